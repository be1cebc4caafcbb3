"""Llama 2, 3 and all that share its shape (SmolLM 2, Yi and many others)."""

from __future__ import annotations

from executor_svc.models.config import ModelConfig
from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.reading import read_llama_like


def read_llama(fields: ConfigFields) -> ModelConfig:
    """Llama's bias, where it has one, is on all four attention projections."""
    return read_llama_like(fields, "LlamaForCausalLM")


LLAMA = Family(
    "LlamaForCausalLM",
    read_llama,
    {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
)
