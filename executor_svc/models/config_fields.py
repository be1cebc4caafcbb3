"""Reading config.json's fields with their defaults and their older spellings; what is not supported is refused here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from executor_svc.layers.rotary import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    RotaryConfig,
    RotaryScaling,
    YarnScaling,
)
from executor_svc.weights import ModelLoadError, UnsupportedModelError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary types that config.json may name. ("frequency_factors" is what a GGUF file's tensor of factors becomes.)"""


class ConfigFields:
    """The fields, with errors that name the file and the field. A field that is null counts as absent."""

    def __init__(self, path: Path, fields: Mapping[str, Any], *, prefix: str = "") -> None:
        self.path = path
        self._fields = fields
        self._prefix = prefix

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value as it is."""
        value = self._fields.get(name)
        return default if value is None else value

    def has(self, name: str) -> bool:
        """Whether the field is there, be it null."""
        return name in self._fields

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a whole number. ModelLoadError where it is none, or absent without a default."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, value, "a whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(name, value, "a number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a truth value."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def part(self, name: str) -> ConfigFields:
        """Return the fields of an object; none where it is absent."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise self._wrong(name, value, "an object")
        return ConfigFields(self.path, value, prefix=f"{self._prefix}{name}.")

    def refuse(self, name: str, supported: str) -> UnsupportedModelError:
        """Return the error for a value that is not supported."""
        value = self.get(name)
        return UnsupportedModelError(
            f"{self.path}: {self._prefix}{name} {value!r} is not supported; supported: {supported}"
        )

    def _wrong(self, name: str, value: Any, wanted: str) -> ModelLoadError:
        what = "is missing" if value is None else f"is {value!r}, not {wanted}"
        return ModelLoadError(f"{self.path}: {self._prefix}{name} {what}")


def read_rotary(fields: ConfigFields, head_dim: int) -> RotaryConfig:
    """Read the rotary settings: `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""
    rope = fields.part("rope_scaling" if fields.get("rope_scaling") else "rope_parameters")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    for source in (fields, rope):
        if source.number("partial_rotary_factor", 1.0) != 1.0:
            raise source.refuse("partial_rotary_factor", "1.0")
    kind_name = "rope_type" if rope.has("rope_type") else "type"
    scaling: RotaryScaling | None
    match rope.get(kind_name, "default"):
        case "default":
            scaling = None
        case "linear":
            scaling = LinearScaling(rope.number("factor"))
        case "llama3":
            scaling = Llama3Scaling(
                factor=rope.number("factor"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
                original_max_position_embeddings=_original_length(fields, rope),
            )
        case "yarn":
            scaling = _read_yarn(fields, rope)
        case "frequency_factors":
            scaling = FrequencyFactors(tuple(rope.get("factors")))
        case _:
            raise rope.refuse(kind_name, ", ".join(ROPE_TYPES))
    return RotaryConfig(head_dim, theta, scaling)


def _read_yarn(fields: ConfigFields, rope: ConfigFields) -> YarnScaling:
    original = _original_length(fields, rope)
    factor = rope.number("factor", fields.integer("max_position_embeddings") / original)
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


def _original_length(fields: ConfigFields, rope: ConfigFields) -> int:
    """Return the context the model was trained for before it was stretched."""
    name = "original_max_position_embeddings"
    # A value beside the rotary settings goes before one in them.
    return fields.integer(name, rope.integer(name, fields.integer("max_position_embeddings")))
