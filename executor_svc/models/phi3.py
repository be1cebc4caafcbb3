"""Phi-3 and Phi-4, dense text models: projections fused on disk, LongRoPE."""

from __future__ import annotations

from executor_svc.models.config import ModelConfig
from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.naming import Names
from executor_svc.models.reading import read_llama_like, read_window, with_windows


def read_phi3(fields: ConfigFields) -> ModelConfig:
    """Llama's shape without biases; heads may turn in part; one window for all layers."""
    config = read_llama_like(fields, "Phi3ForCausalLM", qkv_bias=False, output_bias=False, mlp_bias=False)
    return with_windows(config, [read_window(fields)] * config.num_layers)


PHI3 = Family(
    "Phi3ForCausalLM",
    read_phi3,
    {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
    },
    names=Names(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
)
