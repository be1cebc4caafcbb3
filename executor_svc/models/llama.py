"""Llama 2, 3 and all that share its shape (SmolLM 2, Yi and many others)."""

from __future__ import annotations

from executor_svc.models.config import ModelConfig
from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.reading import read_llama_like


def read_llama(fields: ConfigFields) -> ModelConfig:
    """Llama's bias, where it has one, is on all four attention projections."""
    return read_llama_like(fields, "LlamaForCausalLM")


def read_internlm3(fields: ConfigFields) -> ModelConfig:
    """Of InternLM 3, whose Q, K and V have a flag of their own for biases."""
    qkv_bias = fields.flag("qkv_bias", fields.flag("attention_bias"))
    return read_llama_like(fields, "InternLM3ForCausalLM", qkv_bias=qkv_bias)


_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
LLAMA = Family("LlamaForCausalLM", read_llama, _DEFAULTS)
INTERNLM3 = Family(
    "InternLM3ForCausalLM",
    read_internlm3,
    {**_DEFAULTS, "max_position_embeddings": 32768},
    {"attention_bias": "bias", "mlp_bias": "bias"},
)
