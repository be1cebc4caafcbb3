"""Gemma 2: norms around every sublayer, soft caps, a window on every other layer."""

from __future__ import annotations

from dataclasses import replace

from executor_svc.models.config import ModelConfig, NormKind, Placement
from executor_svc.models.config_fields import FULL, SLIDING, ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.reading import read_activation, read_layer_types, read_llama_like, read_window, with_windows


def read_gemma2(fields: ConfigFields) -> ModelConfig:
    """Scores are scaled by query_pre_attn_scalar, not by the width of a head."""
    fields.refuse_set("use_bidirectional_attention")
    config = read_llama_like(
        fields,
        "Gemma2ForCausalLM",
        norm=NormKind.RMS_PLUS_ONE,
        placement=Placement.AROUND,
        activation=read_activation(fields, "hidden_activation"),
        mlp_bias=False,
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        attention_soft_cap=fields.number("attn_logit_softcapping", 0.0),
        logit_soft_cap=fields.number("final_logit_softcapping", 0.0),
    )
    scale, window = fields.positive("query_pre_attn_scalar") ** -0.5, read_window(fields)
    config = replace(config, layers=tuple(replace(layer, attention_scale=scale) for layer in config.layers))
    otherwise = [FULL if index % 2 else SLIDING for index in range(config.num_layers)]
    types = read_layer_types(fields, config.num_layers, otherwise)
    return with_windows(config, [window if each == SLIDING else 0 for each in types])


GEMMA2 = Family(
    "Gemma2ForCausalLM",
    read_gemma2,
    {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
)
