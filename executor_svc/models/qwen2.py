"""Qwen 2 and 2.5, dense."""

from __future__ import annotations

from executor_svc.models.config import ModelConfig
from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.llama import name_llama_tensors, read_llama_like


def read_qwen2(fields: ConfigFields) -> ModelConfig:
    """Llama's shape with a bias on Q, K and V alone."""
    config = read_llama_like(fields, "Qwen2ForCausalLM", qkv_bias=True, output_bias=False)
    if fields.flag("use_sliding_window") and _has_window_layers(fields, config):
        window = fields.integer("sliding_window", 4096)
        if window < config.max_position_embeddings:
            raise fields.refuse("use_sliding_window", "false")
    return config


def _has_window_layers(fields: ConfigFields, config: ModelConfig) -> bool:
    layer_types = fields.get("layer_types")
    if layer_types is not None:
        return "sliding_attention" in layer_types
    return fields.integer("max_window_layers", 28) < config.num_layers


QWEN2 = Family("Qwen2ForCausalLM", read_qwen2, name_llama_tensors)
