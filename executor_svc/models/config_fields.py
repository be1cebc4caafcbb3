"""Reading config.json's fields: what a file leaves out has its family's default, null is a value of its own."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from executor_svc.weights import ModelLoadError, UnsupportedModelError

FULL, SLIDING = "full_attention", "sliding_attention"
"""Words of `layer_types`."""
_TOO_LARGE = 1 << 31
"""No size of a model gets there."""


class ConfigFields:
    """The fields, with errors that name the file and the field."""

    def __init__(
        self,
        path: Path,
        fields: Mapping[str, Any],
        *,
        prefix: str = "",
        defaults: Mapping[str, Any] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """`defaults`: what fields mean that are not there. (One that is null is there.) `aliases`: what fields are
        called that are not there by their own name.
        """
        self.path = path
        self._fields = fields
        self._prefix = prefix
        self._defaults: Mapping[str, Any] = defaults or {}
        self._aliases: Mapping[str, str] = aliases or {}

    def within(self, defaults: Mapping[str, Any], aliases: Mapping[str, str] | None = None) -> ConfigFields:
        """Return the same fields with these defaults and aliases."""
        return ConfigFields(self.path, self._fields, prefix=self._prefix, defaults=defaults, aliases=aliases)

    def get(self, name: str, if_null: Any = None) -> Any:
        """Return the value, or its default where it is absent; `if_null` where that is null."""
        key = self._key(name)
        value = self._fields[key] if key in self._fields else self._defaults.get(key)
        return if_null if value is None else value

    def has(self, name: str) -> bool:
        """Whether the field is there, be it null."""
        return self._key(name) in self._fields

    def names(self) -> list[str]:
        """Return the names of the fields that are there."""
        return list(self._fields)

    def integer(self, name: str, if_null: int | None = None) -> int:
        """Return a whole number, which may be written 4096.0. ModelLoadError where it is none, or null or absent
        without a default.
        """
        value = self.get(name, if_null)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= _TOO_LARGE:
            raise self._wrong(name, value, "a whole number")
        return value

    def count(self, name: str, if_null: int | None = None) -> int:
        """Return a whole number that is at least 1."""
        value = self.integer(name, if_null)
        if value < 1:
            raise self._wrong(name, value, "at least 1")
        return value

    def number(self, name: str, if_null: float | None = None) -> float:
        """Return a finite number."""
        value = self.get(name, if_null)
        if not _is_number(value):
            raise self._wrong(name, value, "a number")
        return float(value)

    def positive(self, name: str, if_null: float | None = None) -> float:
        """Return a finite number above 0."""
        value = self.number(name, if_null)
        if value <= 0:
            raise self._wrong(name, value, "above 0")
        return value

    def flag(self, name: str, if_null: bool = False) -> bool:
        """Return a truth value."""
        value = self.get(name, if_null)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a list of numbers."""
        value = self.get(name)
        if not isinstance(value, list | tuple) or not all(map(_is_number, value)):
            raise self._wrong(name, value, "a list of numbers")
        return tuple(map(float, value))

    def per_layer(self, name: str, num_layers: int) -> list[Any] | None:
        """Return a list with an entry for each layer, None where the field is null or absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < num_layers:
            raise self._wrong(name, value, f"a list of at least {num_layers} entries, one for each layer")
        return value[:num_layers]

    def indices(self, name: str) -> frozenset[int]:
        """Return a list of numbers of layers; none where it is null or absent."""
        value = self.get(name, [])
        if not isinstance(value, list) or any(type(each) is not int for each in value):
            raise self._wrong(name, value, "a list of whole numbers")
        return frozenset(value)

    def part(self, name: str) -> ConfigFields:
        """Return the fields of an object; none where it is null or absent."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise self._wrong(name, value, "an object")
        return ConfigFields(self.path, value, prefix=f"{self._prefix}{name}.")

    def refuse(self, name: str, supported: str) -> UnsupportedModelError:
        """Return the error for a value that is not supported."""
        value = self.get(name)
        return UnsupportedModelError(
            f"{self.path}: {self._prefix}{self._key(name)} {value!r} is not supported; supported: {supported}"
        )

    def refuse_set(self, *names: str) -> None:
        """Raise UnsupportedModelError where one of these is there and neither null, false, empty nor zero."""
        for name in names:
            if self.get(name):
                raise self.refuse(name, "none")

    def _wrong(self, name: str, value: Any, wanted: str) -> ModelLoadError:
        what = "is missing" if value is None else f"is {value!r}, not {wanted}"
        return ModelLoadError(f"{self.path}: {self._prefix}{self._key(name)} {what}")

    def _key(self, name: str) -> str:
        return name if name in self._fields else self._aliases.get(name, name)


def _is_number(value: Any) -> bool:
    """Whether it is a finite number that fits a float."""
    # (NaN is not at most anything.)
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
