"""StableLM: LayerNorm on Llama's shape, heads that turn in part; attention and MLP may stand side by side."""

from __future__ import annotations

from collections.abc import Collection

from executor_svc.models.config import ModelConfig, NormKind, Placement
from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.naming import Names
from executor_svc.models.reading import read_llama_like
from executor_svc.models.rope_fields import read_rotary


def read_stablelm(fields: ConfigFields) -> ModelConfig:
    """A quarter of each head turns unless the file says otherwise. Side by side, both sublayers read one norm."""
    head_dim = fields.integer("hidden_size") // max(fields.integer("num_attention_heads"), 1)
    return read_llama_like(
        fields,
        "StableLmForCausalLM",
        rotary=read_rotary(fields, head_dim, default_partial=0.25),
        norm=NormKind.LAYER,
        placement=Placement.PARALLEL_SHARED if fields.flag("use_parallel_residual") else Placement.BEFORE,
        output_bias=False,
        mlp_bias=False,
    )


def _names(found: Collection[str]) -> Names:
    is_shared = "model.layers.0.post_attention_layernorm.weight" not in found
    return Names(norms={"attention_norm": "input_layernorm"} if is_shared else {})


STABLELM = Family(
    "StableLmForCausalLM",
    read_stablelm,
    {
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "use_qkv_bias": False,
        "use_parallel_residual": False,
    },
    {"rms_norm_eps": "layer_norm_eps", "attention_bias": "use_qkv_bias"},
    _names,
    unless=("qk_layernorm",),
)
