"""Granite 3, dense: Llama with scales. Granite 4 where it is dense: the same with names of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executor_svc.models.config import ModelConfig
from executor_svc.models.config_fields import FULL, ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.naming import Names
from executor_svc.models.reading import read_llama_like
from executor_svc.weights import UnsupportedModelError


def read_granite(fields: ConfigFields, **changes: Any) -> ModelConfig:
    """Embeddings, scores, what each sublayer gives, and logits have scales of their own. `changes`: see
    read_llama_like.
    """
    config = read_llama_like(
        fields,
        "GraniteForCausalLM",
        embedding_scale=fields.number("embedding_multiplier"),
        residual_scale=fields.number("residual_multiplier"),
        logit_scale=1.0 / fields.positive("logits_scaling"),
        **changes,
    )
    scale = fields.number("attention_multiplier")
    return replace(config, layers=tuple(replace(layer, attention_scale=scale) for layer in config.layers))


def read_granite_hybrid(fields: ConfigFields) -> ModelConfig:
    """Of the models that may mix attention, recurrent layers and experts, those of attention alone. Their MLP is the
    one that experts would share; heads turn only where the file says so.
    """
    fields.refuse_set("num_local_experts")
    types = fields.get("layer_types")
    if not isinstance(types, list) or any(each not in ("attention", FULL) for each in types):
        raise UnsupportedModelError(
            f"{fields.path}: layer_types has layers other than 'attention', with recurrent state, which blocks of KV "
            "memory do not hold; models of attention alone are supported"
        )
    turns = fields.get("position_embedding_type", "nope")
    if turns not in ("rope", "nope"):
        raise fields.refuse("position_embedding_type", "rope, nope")
    changes: dict[str, Any] = {"intermediate_size": fields.integer("shared_intermediate_size"), "mlp_bias": False}
    if turns == "nope":
        changes["rotary"] = None
    return replace(read_granite(fields, **changes), architecture="GraniteMoeHybridForCausalLM")


_DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
GRANITE = Family("GraniteForCausalLM", read_granite, _DEFAULTS)
GRANITE_HYBRID = Family(
    "GraniteMoeHybridForCausalLM",
    read_granite_hybrid,
    {**_DEFAULTS, "num_local_experts": 8, "shared_intermediate_size": 1024},
    names=Names(up=("shared_mlp.input_linear",), down="shared_mlp.output_linear"),
)
