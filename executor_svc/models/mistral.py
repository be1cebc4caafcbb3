"""Mistral, with its sliding window where it has one, and Ministral, whose layers differ in it."""

from __future__ import annotations

from dataclasses import replace

from executor_svc.models.config import ModelConfig
from executor_svc.models.config_fields import FULL, SLIDING, ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.reading import read_layer_types, read_llama_like, read_window, with_windows


def read_mistral(fields: ConfigFields) -> ModelConfig:
    """Llama's shape without biases; one window for all layers. An absent sliding_window is one, a null one is none."""
    config = read_llama_like(fields, "MistralForCausalLM", qkv_bias=False, output_bias=False, mlp_bias=False)
    return with_windows(config, [read_window(fields)] * config.num_layers)


def read_ministral(fields: ConfigFields) -> ModelConfig:
    """The same, with a window on those layers that `layer_types` names."""
    config = replace(read_mistral(fields), architecture="MinistralForCausalLM")
    window = read_window(fields)
    types = read_layer_types(fields, config.num_layers, [SLIDING if window else FULL] * config.num_layers)
    return with_windows(config, [window if each == SLIDING else 0 for each in types])


_DEFAULTS = {
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
MISTRAL = Family("MistralForCausalLM", read_mistral, _DEFAULTS)
MINISTRAL = Family("MinistralForCausalLM", read_ministral, _DEFAULTS)
