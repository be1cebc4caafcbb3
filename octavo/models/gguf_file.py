"""Reading the header of a GGUF file: its metadata, and where its tensors lie.

Written for speed of start: `gguf.GGUFReader` makes an array of every token of the vocabulary and takes seconds for
what takes a tenth of one here. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from octavo.models.errors import ModelError
from octavo.models.lfs_pointer import check_no_pointer

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")
_SKIPPED = object()
_STRING = 8
_ARRAY = 9
_MOST_DIMENSIONS = 4
_DEEPEST_ARRAY = 4


_T = TypeVar("_T")


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies.

    `shape` has the outermost dimension first, as torch has it; `ggml_type` is the number of its element type; `offset`
    counts bytes from the start of the file. That its data lies within the file is not checked.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata by key: numbers, bools, strings and lists of these.

    Raises ModelError where the file is no GGUF file of version 2 or 3, or is cut short or damaged.
    """
    return _read(path, lambda reader: reader.metadata())


def read_header(path: Path) -> tuple[dict[str, Any], tuple[TensorEntry, ...]]:
    """Return the metadata without lists of strings, and the tensors' entries. Raises ModelError as read_metadata does.

    Those lists are the vocabulary: who wants the tensors needs none of it, and it would take most of the time.
    """
    return _read(path, lambda reader: (reader.metadata(with_strings=False), reader.tensors()))


def _read(path: Path, read: Callable[[_Reader], _T]) -> _T:
    check_no_pointer(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return read(_Reader(data))
    except _FormatError as error:
        raise ModelError(f"{path}: {error}") from None
    except (struct.error, UnicodeDecodeError):
        raise ModelError(f"{path} is damaged or incomplete: fetch it again") from None
    except ValueError:  # mmap's word for an empty file
        raise ModelError(f"{path} is empty: fetch it again") from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None


class _FormatError(Exception):
    """The bytes are not what this reader knows."""


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0
        self._num_tensors = 0
        self._alignment = 32
        self._with_strings = True

    def metadata(self, *, with_strings: bool = True) -> dict[str, Any]:
        """Read the metadata, lists of strings only where asked for."""
        if self._data[:4] != _MAGIC:
            raise _FormatError("not a GGUF file")
        self._at = 4
        (version,) = self._unpack("I")
        if version not in _VERSIONS:
            raise _FormatError(f"GGUF version {version} (or big-endian) is not supported, only {_VERSIONS}")
        self._num_tensors, count = self._unpack("QQ")
        self._with_strings = with_strings
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self._string()
            if key in metadata:
                raise _FormatError(f"the metadata has {key!r} twice: the file is damaged")
            metadata[key] = self._value(self._unpack("I")[0])
        metadata = {key: value for key, value in metadata.items() if value is not _SKIPPED}
        self._alignment = metadata.get("general.alignment", self._alignment)
        if not isinstance(self._alignment, int) or self._alignment < 8 or self._alignment % 8:
            raise _FormatError(f"general.alignment is {self._alignment!r}, no multiple of 8")
        return metadata

    def tensors(self) -> tuple[TensorEntry, ...]:
        """Read the entries, which follow the metadata."""
        entries = []
        for _ in range(self._num_tensors):
            name = self._string()
            (num_dimensions,) = self._unpack("I")
            if num_dimensions > _MOST_DIMENSIONS:
                raise _FormatError(f"tensor {name} has {num_dimensions} dimensions: the file is damaged")
            shape = self._unpack(f"{num_dimensions}Q")[::-1]
            kind, offset = self._unpack("IQ")
            if offset % self._alignment:
                raise _FormatError(f"tensor {name} lies at byte {offset}, off the alignment of {self._alignment}")
            entries.append((name, shape, kind, offset))
        # Offsets count from the first aligned byte after the entries.
        data_start = -(-self._at // self._alignment) * self._alignment
        return tuple(TensorEntry(name, shape, kind, data_start + offset) for name, shape, kind, offset in entries)

    def _value(self, kind: int, depth: int = 0) -> Any:
        if depth > _DEEPEST_ARRAY:
            raise _FormatError("lists within lists within lists: the file is damaged")
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._unpack(self._format(kind))[0]
        element, count = self._unpack("IQ")
        if element == _STRING:
            return [self._string() for _ in range(count)] if self._with_strings else self._skip_strings(count)
        if element == _ARRAY:
            return [self._value(_ARRAY, depth + 1) for _ in range(count)]
        # Checked first: a damaged count must not ask for memory that the file cannot fill.
        code = self._format(element)
        if count * struct.calcsize(code) > len(self._data) - self._at:
            raise struct.error
        return list(self._unpack(f"{count}{code}"))

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        start, self._at = self._at, self._at + length
        if self._at > len(self._data):
            raise struct.error
        return self._data[start : self._at].decode("utf-8")

    def _skip_strings(self, count: int) -> object:
        data, at = self._data, self._at
        for _ in range(count):
            at += _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
            if at > len(data):
                raise struct.error
        self._at = at
        return _SKIPPED

    def _unpack(self, code: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(f"<{code}")
        return values

    @staticmethod
    def _format(kind: int) -> str:
        if kind not in _SCALARS:
            raise _FormatError(f"metadata of unknown type {kind}")
        return _SCALARS[kind]
