"""What several families read alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import EllipsisType
from typing import Any

from executor_svc.layers.rotary import RotaryConfig
from executor_svc.models.config import Activation, LayerConfig, ModelConfig
from executor_svc.models.config_fields import FULL, SLIDING, ConfigFields
from executor_svc.models.rope_fields import read_rotary

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_python": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "relu2": Activation.RELU_SQUARED,
}
"""By their names in config.json. The three of GELU_TANH are one formula, written in different orders."""
_GATED = (Activation.SILU, Activation.GELU, Activation.GELU_TANH)
_PLAIN = (Activation.GELU, Activation.GELU_TANH, Activation.RELU, Activation.RELU_SQUARED)

MOST_LAYERS = 1024
"""No model has as many. What a config describes is laid out layer by layer before a tensor is looked at."""


def read_activation(fields: ConfigFields, name: str = "hidden_act", *, gated: bool = True) -> Activation:
    """Read the activation of the MLP, of which the kernel sets have these."""
    supported = _GATED if gated else _PLAIN
    word = fields.get(name)
    found = _ACTIVATIONS.get(word) if isinstance(word, str) else None
    if found is None or found not in supported:
        known = [word for word, activation in _ACTIVATIONS.items() if activation in supported]
        raise fields.refuse(name, ", ".join(known))
    return found


def read_llama_like(
    fields: ConfigFields, architecture: str, *, rotary: RotaryConfig | EllipsisType | None = ..., **changes: Any
) -> ModelConfig:
    """Read the fields that most models have. `changes` go to ModelConfig instead; `rotary` where it is not as usual,
    None for heads that do not turn.
    """
    num_heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", hidden_size // max(num_heads, 1))
    if isinstance(rotary, EllipsisType):
        rotary = read_rotary(fields, head_dim)
    layer = LayerConfig(head_dim**-0.5 if head_dim > 0 else 1.0, rotary)
    readers: dict[str, Callable[[], Any]] = {
        "activation": lambda: read_activation(fields, gated=changes.get("gated", True)),
        "intermediate_size": lambda: fields.integer("intermediate_size"),
        "norm_eps": lambda: fields.number("rms_norm_eps"),
        "qkv_bias": lambda: fields.flag("attention_bias"),
        "output_bias": lambda: fields.flag("attention_bias"),
        "mlp_bias": lambda: fields.flag("mlp_bias"),
    }
    shared = {name: read() for name, read in readers.items() if name not in changes}
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        layers=(layer,) * _num_layers(fields),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        **(shared | changes),
    )


def _num_layers(fields: ConfigFields) -> int:
    count = fields.integer("num_hidden_layers")
    if count > MOST_LAYERS:
        raise ValueError(f"num_hidden_layers is {count}: more than {MOST_LAYERS} are not supported")
    return count


def read_layer_types(fields: ConfigFields, num_layers: int, otherwise: Sequence[str]) -> list[str]:
    """Read which layers have a window; `otherwise` where `layer_types` is null or absent."""
    types = fields.per_layer("layer_types", num_layers) or list(otherwise)
    if any(each not in (FULL, SLIDING) for each in types):
        raise fields.refuse("layer_types", f"{FULL}, {SLIDING}")
    return types


def with_windows(config: ModelConfig, windows: Sequence[int]) -> ModelConfig:
    """Give each layer its window, 0 for none. One that is as wide as the context is none."""
    longest = config.max_position_embeddings
    pairs = zip(config.layers, windows, strict=True)
    return replace(
        config, layers=tuple(replace(layer, window=window if window < longest else 0) for layer, window in pairs)
    )


def read_window(fields: ConfigFields) -> int:
    """Read `sliding_window`: 0 where it is null."""
    if fields.get("sliding_window") is None:
        return 0
    window = fields.integer("sliding_window")
    if window < 1:
        raise fields.refuse("sliding_window", "null, or at least 1")
    return window
