"""OLMo 3: OLMo 2 with a window on three of four layers, which turn without the scaling of the others."""

from __future__ import annotations

from dataclasses import replace

from executor_svc.models.config import ModelConfig
from executor_svc.models.config_fields import FULL, SLIDING, ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.olmo2 import OLMO2, read_olmo2
from executor_svc.models.reading import read_layer_types, read_window, with_windows
from executor_svc.models.rope_fields import read_rotary_by_type

_THETA = 500_000.0


def read_olmo3(fields: ConfigFields) -> ModelConfig:
    """`rope_scaling`, where a file has it, is of the layers that read everything."""
    config = replace(read_olmo2(fields, rotary=None), architecture="Olmo3ForCausalLM")
    otherwise = [SLIDING if (index + 1) % 4 else FULL for index in range(config.num_layers)]
    types = read_layer_types(fields, config.num_layers, otherwise)
    rotaries = read_rotary_by_type(fields, config.head_dim, {FULL: _THETA, SLIDING: _THETA})
    layers = [replace(layer, rotary=rotaries[each]) for layer, each in zip(config.layers, types, strict=True)]
    window = read_window(fields)
    return with_windows(replace(config, layers=tuple(layers)), [window if each == SLIDING else 0 for each in types])


OLMO3 = Family("Olmo3ForCausalLM", read_olmo3, {**OLMO2.defaults, "sliding_window": 4096})
