"""Granite 3, dense: Llama with scales."""

from __future__ import annotations

from dataclasses import replace

from executor_svc.models.config import ModelConfig
from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.reading import read_llama_like


def read_granite(fields: ConfigFields) -> ModelConfig:
    """Embeddings, scores, what each sublayer gives, and logits have scales of their own."""
    config = read_llama_like(
        fields,
        "GraniteForCausalLM",
        embedding_scale=fields.number("embedding_multiplier"),
        residual_scale=fields.number("residual_multiplier"),
        logit_scale=1.0 / fields.positive("logits_scaling"),
    )
    scale = fields.number("attention_multiplier")
    return replace(config, layers=tuple(replace(layer, attention_scale=scale) for layer in config.layers))


GRANITE = Family(
    "GraniteForCausalLM",
    read_granite,
    {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    },
)
