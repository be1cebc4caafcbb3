"""SmolLM 3: Llama in which every fourth layer knows no positions."""

from __future__ import annotations

from dataclasses import replace

from executor_svc.models.config import ModelConfig
from executor_svc.models.config_fields import FULL, SLIDING, ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.reading import read_layer_types, read_llama_like, read_window, with_windows
from executor_svc.models.rope_fields import read_rotary


def read_smollm3(fields: ConfigFields) -> ModelConfig:
    """`no_rope_layers` has a 1 where a layer turns. Windows, if they are on, are for layers that do not."""
    head_dim = fields.integer(
        "head_dim", fields.integer("hidden_size") // max(fields.integer("num_attention_heads"), 1)
    )
    rotary = read_rotary(fields, head_dim, default_theta=2e6)
    config = read_llama_like(fields, "SmolLM3ForCausalLM", rotary=rotary)
    interval = fields.count("no_rope_layer_interval")
    turns = fields.per_layer("no_rope_layers", config.num_layers) or [
        (index + 1) % interval != 0 for index in range(config.num_layers)
    ]
    layers = [layer if turn else replace(layer, rotary=None) for layer, turn in zip(config.layers, turns, strict=True)]
    config = replace(config, layers=tuple(layers))
    window = read_window(fields) if fields.flag("use_sliding_window") else 0
    types = read_layer_types(fields, config.num_layers, [FULL if turn else SLIDING for turn in turns])
    return with_windows(config, [window if each == SLIDING else 0 for each in types])


SMOLLM3 = Family(
    "SmolLM3ForCausalLM",
    read_smollm3,
    {
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "no_rope_layer_interval": 4,
    },
)
