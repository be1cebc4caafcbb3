"""Mixtral: Mistral with routed experts."""

from __future__ import annotations

from dataclasses import replace

from executor_svc.models.config import ExpertsConfig, ModelConfig
from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.naming import ExpertNames, Names
from executor_svc.models.reading import read_llama_like, read_window, with_windows
from executor_svc.models.rope_fields import read_rotary


def read_mixtral(fields: ConfigFields) -> ModelConfig:
    """Every layer has experts, whose weights always sum to 1."""
    size, num_heads = fields.integer("intermediate_size"), fields.integer("num_attention_heads")
    num_experts = fields.integer("num_local_experts")
    experts = ExpertsConfig(num_experts, fields.integer("num_experts_per_tok"), size, normalize=True)
    head_dim = fields.integer("head_dim", fields.integer("hidden_size") // max(num_heads, 1))
    config = read_llama_like(
        fields,
        "MixtralForCausalLM",
        rotary=read_rotary(fields, head_dim, default_theta=1e6),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        experts=experts,
    )
    config = replace(config, layers=tuple(replace(layer, routed=True) for layer in config.layers))
    return with_windows(config, [read_window(fields)] * config.num_layers)


MIXTRAL = Family(
    "MixtralForCausalLM",
    read_mixtral,
    {
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
    },
    {"num_local_experts": "num_experts"},
    Names(experts=ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2")),
)
