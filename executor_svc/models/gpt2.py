"""GPT-2 and models of its shape: LayerNorm, learned positions, a plain GELU; weights lie transposed."""

from __future__ import annotations

from dataclasses import replace

from executor_svc.models.config import ModelConfig, NormKind
from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.naming import Names
from executor_svc.models.reading import read_llama_like

_BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}


def read_gpt2(fields: ConfigFields) -> ModelConfig:
    """Scores may be left as they are, or scaled by the layer's number too."""
    fields.refuse_set("add_cross_attention")
    inner, positions = fields.integer("n_inner", 4 * fields.integer("n_embd")), fields.integer("n_positions")
    shape = {"norm": NormKind.LAYER, "gated": False, "intermediate_size": inner, "learned_positions": positions}
    config = read_llama_like(fields, "GPT2LMHeadModel", rotary=None, **shape, **_BIASES)
    scale = config.head_dim**-0.5 if fields.flag("scale_attn_weights") else 1.0
    divisors = [
        index + 1 if fields.flag("scale_attn_by_inverse_layer_idx") else 1 for index in range(config.num_layers)
    ]
    return replace(config, layers=tuple(replace(config.layers[0], attention_scale=scale / each) for each in divisors))


_NAMES = Names(
    embedding="transformer.wte",
    positions="transformer.wpe",
    layers="transformer.h",
    final_norm="transformer.ln_f",
    norms={"attention_norm": "ln_1", "mlp_norm": "ln_2"},
    qkv=("attn.c_attn",),
    attention_output="attn.c_proj",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    transposed=True,
    # Masks that lie among the weights.
    ignored=(".attn.bias", ".attn.masked_bias"),
)
_DEFAULTS = {"n_positions": 1024, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
_FLAGS = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": True}
_SIZES = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
_OTHERS = {"max_position_embeddings": "n_positions", "hidden_act": "activation_function"}
_ALIASES = _SIZES | _OTHERS | {"rms_norm_eps": "layer_norm_epsilon"}
GPT2 = Family("GPT2LMHeadModel", read_gpt2, _DEFAULTS | _FLAGS, _ALIASES, _NAMES)
