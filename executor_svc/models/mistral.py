"""Mistral, with its sliding window where it has one."""

from __future__ import annotations

from executor_svc.models.config import ModelConfig
from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.reading import read_llama_like, read_window, with_windows


def read_mistral(fields: ConfigFields) -> ModelConfig:
    """Llama's shape without biases; one window for all layers. An absent sliding_window is one, a null one is none."""
    config = read_llama_like(fields, "MistralForCausalLM", qkv_bias=False, output_bias=False, mlp_bias=False)
    return with_windows(config, [read_window(fields)] * config.num_layers)


MISTRAL = Family(
    "MistralForCausalLM",
    read_mistral,
    {
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
)
