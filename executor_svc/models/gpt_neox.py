"""GPT-NeoX and Pythia: attention and MLP side by side, heads that turn in part."""

from __future__ import annotations

from collections.abc import Collection

from executor_svc.models.config import ModelConfig, NormKind, Placement
from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.naming import Names, find_prefix
from executor_svc.models.reading import read_llama_like
from executor_svc.models.rope_fields import read_rotary


def read_gpt_neox(fields: ConfigFields) -> ModelConfig:
    """A quarter of each head turns unless the file says otherwise, in names of its own."""
    head_dim = fields.integer("hidden_size") // max(fields.integer("num_attention_heads"), 1)
    rotary = read_rotary(
        fields, head_dim, theta_name="rotary_emb_base", partial_name="rotary_pct", default_partial=0.25
    )
    return read_llama_like(
        fields,
        "GPTNeoXForCausalLM",
        rotary=rotary,
        norm=NormKind.LAYER,
        placement=Placement.PARALLEL if fields.flag("use_parallel_residual") else Placement.BEFORE,
        gated=False,
        mlp_bias=True,
    )


def _names(found: Collection[str]) -> Names:
    """The head has either of two names; masks that lie among the weights are ignored."""
    return Names(
        embedding="gpt_neox.embed_in",
        layers="gpt_neox.layers",
        final_norm="gpt_neox.final_layer_norm",
        head=find_prefix(found, ("embed_out", "lm_head"), ".weight"),
        qkv=("attention.query_key_value",),
        qkv_interleaved=True,
        attention_output="attention.dense",
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        ignored=(".attention.bias", ".attention.masked_bias"),
    )


_DEFAULTS = {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "max_position_embeddings": 2048}
_FLAGS = {"use_parallel_residual": True, "attention_bias": True}
GPT_NEOX = Family("GPTNeoXForCausalLM", read_gpt_neox, _DEFAULTS | _FLAGS, {"rms_norm_eps": "layer_norm_eps"}, _names)
