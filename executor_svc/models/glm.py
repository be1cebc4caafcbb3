"""GLM-4 (9B of 2024) and GLM-4-0414: gate and up fused on disk, heads that turn in part, pairs side by side."""

from __future__ import annotations

from executor_svc.models.config import ModelConfig, Placement
from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.naming import Names
from executor_svc.models.reading import read_llama_like
from executor_svc.models.rope_fields import read_rotary


def _read(fields: ConfigFields, architecture: str, placement: Placement) -> ModelConfig:
    return read_llama_like(
        fields,
        architecture,
        rotary=read_rotary(fields, fields.integer("head_dim"), default_partial=0.5),
        placement=placement,
        output_bias=False,
        mlp_bias=False,
    )


def read_glm(fields: ConfigFields) -> ModelConfig:
    """Llama's placement of norms; half of each head turns unless the file says otherwise."""
    return _read(fields, "GlmForCausalLM", Placement.BEFORE)


def read_glm4(fields: ConfigFields) -> ModelConfig:
    """The same with norms on what sublayers give too."""
    return _read(fields, "Glm4ForCausalLM", Placement.AROUND)


_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1.5625e-7,
    "max_position_embeddings": 131072,
    "attention_bias": True,
}
_GLM4_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_output_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_mlp_layernorm",
}
GLM = Family("GlmForCausalLM", read_glm, _DEFAULTS, names=Names(up=("mlp.gate_up_proj",), pairs_adjoin=True))
GLM4 = Family(
    "Glm4ForCausalLM",
    read_glm4,
    _DEFAULTS,
    names=Names(up=("mlp.gate_up_proj",), norms=_GLM4_NORMS, pairs_adjoin=True),
)
