"""Command R (Cohere) and R7B (Cohere 2): attention and MLP read one norm side by side; a scale of the logits."""

from __future__ import annotations

from dataclasses import replace

from executor_svc.models.config import ModelConfig, NormKind, Placement
from executor_svc.models.config_fields import FULL, SLIDING, ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.naming import Names
from executor_svc.models.reading import read_layer_types, read_llama_like, read_window, with_windows
from executor_svc.models.rope_fields import read_rotary


def _read(fields: ConfigFields, architecture: str, theta: float) -> ModelConfig:
    head_dim = fields.integer("hidden_size") // max(fields.integer("num_attention_heads"), 1)
    return read_llama_like(
        fields,
        architecture,
        rotary=read_rotary(fields, head_dim, default_theta=theta),
        norm=NormKind.LAYER_NO_BIAS,
        placement=Placement.PARALLEL_SHARED,
        mlp_bias=False,
        logit_scale=fields.number("logit_scale"),
    )


def read_cohere(fields: ConfigFields) -> ModelConfig:
    """LayerNorm without a bias."""
    return _read(fields, "CohereForCausalLM", 500_000.0)


def read_cohere2(fields: ConfigFields) -> ModelConfig:
    """Layers with a window turn, those without, every fourth, do not."""
    config = _read(fields, "Cohere2ForCausalLM", 10_000.0)
    pattern = fields.count("sliding_window_pattern", 4)
    otherwise = [SLIDING if (index + 1) % pattern else FULL for index in range(config.num_layers)]
    types = read_layer_types(fields, config.num_layers, otherwise)
    layers = [
        layer if each == SLIDING else replace(layer, rotary=None)
        for layer, each in zip(config.layers, types, strict=True)
    ]
    window = read_window(fields)
    if not window and SLIDING in types:
        raise fields.refuse("sliding_window", "at least 1")
    return with_windows(replace(config, layers=tuple(layers)), [window if each == SLIDING else 0 for each in types])


_DEFAULTS = {
    "hidden_act": "silu",
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "logit_scale": 0.0625,
}
_ALIASES = {"rms_norm_eps": "layer_norm_eps"}
_NAMES = Names(norms={"attention_norm": "input_layernorm"}, pairs_adjoin=True)
COHERE = Family("CohereForCausalLM", read_cohere, _DEFAULTS, _ALIASES, _NAMES, unless=("use_qk_norm",))
COHERE2 = Family("Cohere2ForCausalLM", read_cohere2, {**_DEFAULTS, "sliding_window": 4096}, _ALIASES, _NAMES)
