"""Qwen 3 with routed experts."""

from __future__ import annotations

from dataclasses import replace

from executor_svc.models.config import ExpertsConfig, ModelConfig, QkNorm
from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.naming import ExpertNames, Names
from executor_svc.models.reading import read_llama_like, read_window, with_windows


def read_qwen3_moe(fields: ConfigFields) -> ModelConfig:
    """Every decoder_sparse_step-th layer has experts, but for mlp_only_layers. One window for all layers."""
    num_experts = fields.integer("num_local_experts")
    experts = ExpertsConfig(
        num_experts,
        fields.integer("num_experts_per_tok"),
        fields.integer("moe_intermediate_size"),
        fields.flag("norm_topk_prob"),
    )
    config = read_llama_like(fields, "Qwen3MoeForCausalLM", qk_norm=QkNorm.HEAD, mlp_bias=False, experts=experts)
    dense, step = fields.indices("mlp_only_layers"), fields.count("decoder_sparse_step")
    layers = [
        replace(layer, routed=num_experts > 0 and index not in dense and (index + 1) % step == 0)
        for index, layer in enumerate(config.layers)
    ]
    window = read_window(fields) if fields.flag("use_sliding_window") else 0
    return with_windows(replace(config, layers=tuple(layers)), [window] * config.num_layers)


QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    read_qwen3_moe,
    {
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_local_experts": 128,
        "norm_topk_prob": False,
    },
    {"num_local_experts": "num_experts"},
    Names(experts=ExpertNames("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj")),
)
