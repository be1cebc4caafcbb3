"""OPT, with the narrower embedding and the norms after the sums of its 350m, and Galactica, which has no biases."""

from __future__ import annotations

from executor_svc.models.config import ModelConfig, NormKind, Placement
from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.naming import Names
from executor_svc.models.reading import read_llama_like


def read_opt(fields: ConfigFields) -> ModelConfig:
    """Norms stand before the sublayers, or after the sums, where there is no final norm."""
    hidden, bias, before = (
        fields.integer("hidden_size"),
        fields.flag("enable_bias"),
        fields.flag("do_layer_norm_before"),
    )
    narrow = fields.integer("word_embed_proj_dim", hidden)
    return read_llama_like(
        fields,
        "OPTForCausalLM",
        rotary=None,
        norm=NormKind.LAYER if fields.flag("layer_norm_elementwise_affine") else NormKind.LAYER_PLAIN,
        placement=Placement.BEFORE if before else Placement.AFTER_ADD,
        final_norm=before and not fields.flag("_remove_final_layer_norm"),
        norm_eps=1e-5,
        gated=False,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        learned_positions=fields.integer("max_position_embeddings"),
        embedding_size=None if narrow == hidden else narrow,
    )


_NAMES = Names(
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    # The table begins with two rows of no position.
    positions_offset=2,
    project_in="model.decoder.project_in",
    project_out="model.decoder.project_out",
    layers="model.decoder.layers",
    final_norm="model.decoder.final_layer_norm",
    norms={"attention_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"},
    attention_output="self_attn.out_proj",
    up=("fc1",),
    down="fc2",
    # A mark of the code that the first files were written by.
    ignored=("decoder.version",),
)
_DEFAULTS = {"max_position_embeddings": 2048, "activation_function": "relu", "tie_word_embeddings": True}
_NORMS = {"do_layer_norm_before": True, "_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True}
_ALIASES = {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"}
OPT = Family("OPTForCausalLM", read_opt, {**_DEFAULTS, **_NORMS, "enable_bias": True}, _ALIASES, _NAMES)
