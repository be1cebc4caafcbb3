"""What a model on disk gives, whatever its format: a config in the vocabulary of config.json, and named tensors."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from executor_svc.weights.errors import UnsupportedModelError, WeightsError

_MOST_NAMED = 8


@dataclass(frozen=True)
class Region:
    """A part of a tensor: rows and, of one that has two dimensions, columns, each first and one past the last. None:
    all of them.
    """

    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part of a tensor."""
        part = self.rows_of(tensor)
        return part if self.columns is None else part[:, slice(*self.columns)]

    def rows_of(self, tensor: Tensor) -> Tensor:
        """Return the rows of a tensor, whole."""
        return tensor if self.rows is None else tensor[slice(*self.rows)]


class Checkpoint(Protocol):
    """An open model. Names are those of the Hugging Face checkpoint format, `model.layers.0.mlp.up_proj.weight`."""

    @property
    def path(self) -> Path:
        """The file or folder, for messages."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The fields of config.json."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by name."""

    @property
    def unreadable(self) -> Mapping[str, str]:
        """Why a tensor cannot be copied, by name, file and tensor named. Only one that is needed makes it matter."""

    def file_of(self, name: str) -> Path:
        """The file that a tensor lies in, for messages."""

    def copy_to(self, name: str, out: Tensor, region: Region | None = None) -> None:
        """Fill `out`, of the tensor's shape and any float dtype, converting on the way. With a region, of its shape:
        then no more of the file is read than the region's rows or, of each row, hardly more than its columns.
        """


def check_tensors(
    checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]], *, ignored: Set[str] = frozenset()
) -> None:
    """Raise WeightsError, naming them, where tensors are missing, surplus (and not ignored) or of another shape.

    Raises UnsupportedModelError where a needed one is of an element type that cannot be read.
    """
    for name in sorted(expected.keys() & checkpoint.unreadable.keys()):
        raise UnsupportedModelError(checkpoint.unreadable[name])
    found = checkpoint.shapes
    wrong = [
        f"{name} is {list(found[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    problems = [
        _problem("missing", sorted(expected.keys() - found.keys())),
        _problem("surplus", sorted(found.keys() - expected.keys() - ignored)),
        _problem("of the wrong shape", wrong),
    ]
    if any(problems):
        raise WeightsError(f"{checkpoint.path}: {'; '.join(filter(None, problems))}")


def _problem(kind: str, items: list[str]) -> str:
    if not items:
        return ""
    rest = f" and {len(items) - _MOST_NAMED} more" if len(items) > _MOST_NAMED else ""
    return f"{len(items)} tensors {kind}: {', '.join(items[:_MOST_NAMED])}{rest}"
