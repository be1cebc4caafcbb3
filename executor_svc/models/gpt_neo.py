"""GPT-Neo, and TinyStories, which has its shape: GPT-2 with a window on every other layer and scores as they are."""

from __future__ import annotations

from dataclasses import replace

from executor_svc.models.config import ModelConfig, NormKind
from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.naming import Names
from executor_svc.models.reading import read_llama_like, with_windows


def read_gpt_neo(fields: ConfigFields) -> ModelConfig:
    """Q, K and V have no biases, all else does. `attention_types` says which layers have the window."""
    inner = fields.integer("intermediate_size", 4 * fields.integer("hidden_size"))
    shape = {"norm": NormKind.LAYER, "gated": False, "intermediate_size": inner}
    biases = {"qkv_bias": False, "output_bias": True, "mlp_bias": True}
    positions = fields.integer("max_position_embeddings")
    config = read_llama_like(fields, "GPTNeoForCausalLM", rotary=None, learned_positions=positions, **shape, **biases)
    window = fields.count("window_size")
    config = replace(config, layers=tuple(replace(layer, attention_scale=1.0) for layer in config.layers))
    return with_windows(config, [window if each == "local" else 0 for each in _kinds(fields, config.num_layers)])


def _kinds(fields: ConfigFields, num_layers: int) -> list[str]:
    """Return "global" or "local" for each layer, of lists of these with how often each is repeated."""
    try:
        parts = fields.get("attention_types", [[["global", "local"], 12]])
        kinds = [kind for names, times in parts for _ in range(min(times, num_layers)) for kind in names]
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != num_layers or any(kind not in ("global", "local") for kind in kinds):
        raise fields.refuse("attention_types", f"'global' or 'local' for each of {num_layers} layers")
    return kinds


_NAMES = Names(
    embedding="transformer.wte",
    positions="transformer.wpe",
    layers="transformer.h",
    final_norm="transformer.ln_f",
    norms={"attention_norm": "ln_1", "mlp_norm": "ln_2"},
    qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
    attention_output="attn.attention.out_proj",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    ignored=(".attn.attention.bias", ".attn.attention.masked_bias"),
)
_DEFAULTS = {"max_position_embeddings": 2048, "window_size": 256, "activation_function": "gelu_new"}
_ALIASES = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
_ALIASES |= {"hidden_act": "activation_function", "rms_norm_eps": "layer_norm_epsilon"}
_DEFAULTS |= {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
GPT_NEO = Family("GPTNeoForCausalLM", read_gpt_neo, _DEFAULTS, _ALIASES, _NAMES)
