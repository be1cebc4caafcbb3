"""Qwen 2 and 2.5, dense."""

from __future__ import annotations

from executor_svc.models.config import ModelConfig
from executor_svc.models.config_fields import FULL, SLIDING, ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.reading import read_layer_types, read_llama_like, read_window, with_windows


def read_qwen2(fields: ConfigFields) -> ModelConfig:
    """Llama's shape with a bias on Q, K and V alone."""
    config = read_llama_like(fields, "Qwen2ForCausalLM", qkv_bias=True, output_bias=False, mlp_bias=False)
    return with_qwen_windows(config, fields)


def with_qwen_windows(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    """Give the layers from max_window_layers on a window, or those that layer_types names, if windows are on at all."""
    window = read_window(fields) if fields.flag("use_sliding_window") else 0
    if not window:
        return config
    first = fields.integer("max_window_layers")
    otherwise = [SLIDING if index >= first else FULL for index in range(config.num_layers)]
    types = read_layer_types(fields, config.num_layers, otherwise)
    return with_windows(config, [window if each == SLIDING else 0 for each in types])


QWEN2 = Family(
    "Qwen2ForCausalLM",
    read_qwen2,
    {
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
)
