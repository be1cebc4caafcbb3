"""Mistral, where its sliding window covers the whole context."""

from __future__ import annotations

from executor_svc.models.config import ModelConfig
from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.llama import name_llama_tensors, read_llama_like


def read_mistral(fields: ConfigFields) -> ModelConfig:
    """Llama's shape without biases. An absent sliding_window means 4096, a null one none."""
    config = read_llama_like(fields, "MistralForCausalLM", qkv_bias=False, output_bias=False)
    window = fields.get("sliding_window") if fields.has("sliding_window") else 4096
    if window is not None and window < config.max_position_embeddings:
        raise fields.refuse("sliding_window", f"none, or one of at least {config.max_position_embeddings} tokens")
    return config


MISTRAL = Family("MistralForCausalLM", read_mistral, name_llama_tensors)
