"""Gemma 3, text: QK-norm, and layers with a window that turn by frequencies of their own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from executor_svc.models.config import ModelConfig, NormKind, Placement, QkNorm
from executor_svc.models.config_fields import FULL, SLIDING, ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.naming import Names, find_prefix
from executor_svc.models.reading import read_activation, read_layer_types, read_llama_like, read_window, with_windows
from executor_svc.models.rope_fields import read_rotary_by_type

DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
"""All sizes are here: the files of the larger models name only what differs."""
_THETAS = {FULL: 1_000_000.0, SLIDING: 10_000.0}
_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def read_gemma3(fields: ConfigFields) -> ModelConfig:
    """Five layers with a window, then one without. Attention's soft cap is refused: the models' own code has none."""
    fields.refuse_set("use_bidirectional_attention", "attn_logit_softcapping")
    config = read_llama_like(
        fields,
        "Gemma3ForCausalLM",
        rotary=None,
        norm=NormKind.RMS_PLUS_ONE,
        placement=Placement.AROUND,
        qk_norm=QkNorm.HEAD,
        activation=read_activation(fields, "hidden_activation"),
        mlp_bias=False,
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        logit_soft_cap=fields.number("final_logit_softcapping", 0.0),
    )
    pattern = fields.count("sliding_window_pattern", 6)
    otherwise = [SLIDING if (index + 1) % pattern else FULL for index in range(config.num_layers)]
    types = read_layer_types(fields, config.num_layers, otherwise)
    scale, window = fields.positive("query_pre_attn_scalar") ** -0.5, read_window(fields)
    rotaries = read_rotary_by_type(fields, config.head_dim, _THETAS, sliding_theta_name="rope_local_base_freq")
    layers = [
        replace(layer, attention_scale=scale, rotary=rotaries[each])
        for layer, each in zip(config.layers, types, strict=True)
    ]
    return with_windows(replace(config, layers=tuple(layers)), [window if each == SLIDING else 0 for each in types])


def read_gemma3_conditional(fields: ConfigFields) -> ModelConfig:
    """Read the text part of a model that sees, too."""
    text = fields.part("text_config").within(DEFAULTS)
    text.refuse_set("final_logit_softcapping")
    tied = fields.flag("tie_word_embeddings", text.flag("tie_word_embeddings"))
    return replace(read_gemma3(text), architecture="Gemma3ForConditionalGeneration", tie_word_embeddings=tied)


def _conditional_names(found: Collection[str]) -> Names:
    """Either of two prefixes is in use; the parts that see are ignored."""
    base = find_prefix(found, ("language_model.model", "model.language_model"), ".embed_tokens.weight")
    return Names(
        embedding=f"{base}.embed_tokens",
        layers=f"{base}.layers",
        final_norm=f"{base}.norm",
        head="language_model.lm_head" if base.startswith("language_model") else "lm_head",
        ignored_parts=_OTHER_PARTS,
    )


GEMMA3 = Family("Gemma3ForCausalLM", read_gemma3, DEFAULTS)
GEMMA3_CONDITIONAL = Family(
    "Gemma3ForConditionalGeneration",
    read_gemma3_conditional,
    {"tie_word_embeddings": True},
    names=_conditional_names,
)
