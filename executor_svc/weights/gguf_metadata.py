"""What a GGUF file's header says, key by key, with errors that name file and key.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from executor_svc.weights.errors import ModelLoadError, UnsupportedModelError

_TOO_LARGE = 1 << 31
"""No size of a model gets there."""


class GgufMetadata:
    """The metadata of one architecture, the shapes of the tensors by checkpoint name, and the rotary factors."""

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        factors: Mapping[str, list[float]],
    ) -> None:
        """`factors`: what the tensors of rotary factors hold, by their names in the file."""
        self.path = path
        self.shapes = shapes
        self.factors = factors
        self._metadata = metadata
        self._architecture = metadata.get("general.architecture")

    def name(self, key: str) -> str:
        """Return a key as it stands in the file."""
        return f"{self._architecture}.{key}"

    def has(self, key: str) -> bool:
        """Whether the file has a key of the architecture."""
        return self.name(key) in self._metadata

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number; of a list, the one that all layers share. ModelLoadError where there is none."""
        value = self._value(key, default)
        if isinstance(value, list) and value:
            if len(set(map(repr, value))) > 1:
                raise UnsupportedModelError(
                    f"{self.path}: {self.name(key)} differs between layers, which is not supported: {value}"
                )
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _TOO_LARGE:
            raise self._wrong(key, value, "a whole number")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number that is at least 1."""
        value = self.integer(key, default)
        if value < 1:
            raise self._wrong(key, value, "at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self._value(key, default)
        # (NaN is not at most anything.)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise self._wrong(key, value, "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a truth value."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """Return a string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def values(self, key: str) -> list[Any] | None:
        """Return a list as it is; None where the key is absent or no list."""
        value = self._metadata.get(self.name(key))
        return value if isinstance(value, list) else None

    def refuse(self, what: str) -> UnsupportedModelError:
        """Return the error for what is asked for and not supported."""
        return UnsupportedModelError(f"{self.path}: {what}")

    def _value(self, key: str, default: Any) -> Any:
        value = self._metadata.get(self.name(key), default)
        if value is None:
            raise ModelLoadError(f"{self.path} lacks {self.name(key)}")
        return value

    def _wrong(self, key: str, value: Any, wanted: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {self.name(key)} is {value!r}, not {wanted}")
