"""Reading the rotary settings: `rope_parameters` as transformers 5 writes them, or the older `rope_theta`,
`rope_scaling` and `partial_rotary_factor`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from executor_svc.layers.rotary import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RotaryConfig,
    RotaryScaling,
    YarnScaling,
    inverse_frequencies,
)
from executor_svc.models.config_fields import FULL, SLIDING, ConfigFields
from executor_svc.weights import ModelLoadError

_MOST_ROTARY_DIM = 1 << 16
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "mrope")
"""Rotary types that config.json may name. ("frequency_factors" is what a GGUF file's tensor of factors becomes.)"""


def read_rotary(
    fields: ConfigFields,
    head_dim: int,
    *,
    default_theta: float = 10000.0,
    theta_name: str = "rope_theta",
    partial_name: str = "partial_rotary_factor",
    default_partial: float = 1.0,
) -> RotaryConfig:
    """Read the settings that all layers share. What is inside `rope_parameters` goes before what is beside it."""
    rope = fields.part("rope_scaling" if fields.get("rope_scaling") else "rope_parameters")
    for name in rope.names():
        if isinstance(rope.get(name), Mapping):
            raise rope.refuse(name, "one set of rotary settings for all layers")
    theta = rope.positive("rope_theta", fields.positive(theta_name, default_theta))
    partial = rope.number("partial_rotary_factor", fields.number(partial_name, default_partial))
    if not 0 <= partial <= 1:
        raise ModelLoadError(f"{fields.path}: {partial_name} is {partial}, not a share of a head")
    return _read(fields, rope, theta, int(head_dim * partial))


def read_rotary_by_type(
    fields: ConfigFields, head_dim: int, thetas: Mapping[str, float], *, sliding_theta_name: str | None = None
) -> dict[str, RotaryConfig]:
    """Read the settings of the two types of layers, by the words of `layer_types`. `thetas`: their default bases.
    `sliding_theta_name`: the older field of the base of layers with a window; None: they have that of the others.

    `rope_parameters` has an object for each type, or older files have the bases beside a scaling that is for the layers
    without a window alone (Gemma 3, OLMo 3).
    """
    bases = {
        FULL: fields.positive("rope_theta", thetas[FULL]),
        SLIDING: fields.positive(sliding_theta_name or "rope_theta", thetas[SLIDING]),
    }
    parameters = fields.get("rope_parameters", {})
    if isinstance(parameters, Mapping) and bases.keys() & parameters.keys():
        objects = {kind: fields.part("rope_parameters").part(kind) for kind in bases}
        return {
            kind: _read(fields, rope, rope.positive("rope_theta", bases[kind]), head_dim)
            for kind, rope in objects.items()
        }
    full = read_rotary(fields, head_dim, default_theta=bases[FULL])
    return {FULL: full, SLIDING: RotaryConfig(head_dim, bases[SLIDING] if sliding_theta_name else full.theta)}


def _read(fields: ConfigFields, rope: ConfigFields, theta: float, rotary_dim: int) -> RotaryConfig:
    try:
        rotary = RotaryConfig(rotary_dim, theta, _read_scaling(fields, rope, rotary_dim))
        # Tried here, for they are worked out only once the weights are there. (Widths are checked with the others.)
        lengths = (0, 1 << 31) if rotary_dim in range(2, _MOST_ROTARY_DIM, 2) else ()
        sets = [inverse_frequencies(rotary, longest) for longest in lengths]
    except (ArithmeticError, ValueError):
        sets = [torch.tensor(math.nan)]
    if not all(bool(frequencies.isfinite().all()) for frequencies in sets):
        raise ModelLoadError(f"{fields.path}: the rotary settings, rope_theta and its scaling, give no frequencies")
    return rotary


def _read_scaling(fields: ConfigFields, rope: ConfigFields, rotary_dim: int) -> RotaryScaling | None:
    kind_name = "rope_type" if rope.has("rope_type") else "type"
    match rope.get(kind_name, "default"):
        # Dynamic scaling begins past max_position_embeddings, where no sequence gets.
        # Mrope gives a token three positions, which are one for text.
        case "default" | "dynamic" | "mrope":
            return None
        case "linear":
            return LinearScaling(rope.positive("factor"))
        case "llama3":
            return Llama3Scaling(
                factor=rope.positive("factor"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
                original_max_position_embeddings=_original_length(fields, rope),
            )
        # Phi-3's first files call LongRoPE by other names.
        case "longrope" | "su":
            return _read_longrope(fields, rope, rotary_dim)
        case "yarn":
            return _read_longrope(fields, rope, rotary_dim) if rope.has("long_factor") else _read_yarn(fields, rope)
        case "frequency_factors":
            return FrequencyFactors(_per_pair(fields, "factors", rope.numbers("factors"), rotary_dim))
        case _:
            raise rope.refuse(kind_name, ", ".join(ROPE_TYPES))


def _read_yarn(fields: ConfigFields, rope: ConfigFields) -> YarnScaling:
    original = _original_length(fields, rope)
    factor = rope.positive("factor", fields.integer("max_position_embeddings") / original)
    mscale, mscale_all_dim = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if mscale and mscale_all_dim:
        attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
    else:
        attention_factor = _yarn_mscale(factor, 1.0)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=rope.number("attention_factor", attention_factor),
        beta_fast=rope.number("beta_fast", 32.0) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0) or 1.0,
        truncate=rope.flag("truncate", True),
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _read_longrope(fields: ConfigFields, rope: ConfigFields, rotary_dim: int) -> LongRopeScaling:
    original = _original_length(fields, rope)
    factor = rope.positive("factor", fields.integer("max_position_embeddings") / original)
    attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRopeScaling(
        short_factor=_per_pair(fields, "short_factor", rope.numbers("short_factor"), rotary_dim),
        long_factor=_per_pair(fields, "long_factor", rope.numbers("long_factor"), rotary_dim),
        original_max_position_embeddings=original,
        attention_factor=rope.number("attention_factor", attention_factor),
    )


def _per_pair(fields: ConfigFields, name: str, factors: tuple[float, ...], rotary_dim: int) -> tuple[float, ...]:
    if len(factors) != rotary_dim // 2:
        raise ModelLoadError(f"{fields.path}: {name} has {len(factors)} entries, not {rotary_dim // 2}")
    return factors


def _original_length(fields: ConfigFields, rope: ConfigFields) -> int:
    """Return the context the model was trained for before it was stretched."""
    name = "original_max_position_embeddings"
    # A value beside the rotary settings goes before one in them.
    return fields.count(name, rope.count(name, fields.count("max_position_embeddings")))
