"""EXAONE 3, which is Llama by other names, and EXAONE 4: norms on what sublayers give, layers that do not turn."""

from __future__ import annotations

from dataclasses import replace

from executor_svc.models.config import ModelConfig, Placement, QkNorm
from executor_svc.models.config_fields import FULL, SLIDING, ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.naming import Names
from executor_svc.models.reading import read_layer_types, read_llama_like, read_window, with_windows
from executor_svc.models.rope_fields import read_rotary


def read_exaone(fields: ConfigFields) -> ModelConfig:
    """Llama's shape. (transformers saves biases under Llama's name for them.)"""
    head_dim = fields.integer(
        "head_dim", fields.integer("hidden_size") // max(fields.integer("num_attention_heads"), 1)
    )
    return read_llama_like(fields, "ExaoneForCausalLM", rotary=read_rotary(fields, head_dim, default_theta=500_000.0))


def read_exaone4(fields: ConfigFields) -> ModelConfig:
    """Where layers have windows, those without one do not turn."""
    config = read_llama_like(
        fields,
        "Exaone4ForCausalLM",
        placement=Placement.AFTER,
        qk_norm=QkNorm.HEAD,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
    )
    window = read_window(fields)
    if not window:
        return config
    pattern = fields.count("sliding_window_pattern") if fields.get("layer_types") is None else 1
    otherwise = [SLIDING if (index + 1) % pattern else FULL for index in range(config.num_layers)]
    types = read_layer_types(fields, config.num_layers, otherwise)
    layers = [
        layer if each == SLIDING else replace(layer, rotary=None)
        for layer, each in zip(config.layers, types, strict=True)
    ]
    return with_windows(replace(config, layers=tuple(layers)), [window if each == SLIDING else 0 for each in types])


EXAONE = Family(
    "ExaoneForCausalLM",
    read_exaone,
    {
        "num_key_value_heads": 8,
        "activation_function": "silu",
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 4096,
    },
    {"hidden_act": "activation_function", "rms_norm_eps": "layer_norm_epsilon", "num_hidden_layers": "num_layers"},
    Names(
        embedding="transformer.wte",
        layers="transformer.h",
        final_norm="transformer.ln_f",
        qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
        attention_output="attn.attention.out_proj",
        up=("mlp.c_fc_0", "mlp.c_fc_1"),
        down="mlp.c_proj",
        norms={"attention_norm": "ln_1", "mlp_norm": "ln_2"},
    ),
)
EXAONE4 = Family(
    "Exaone4ForCausalLM",
    read_exaone4,
    {
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
)
