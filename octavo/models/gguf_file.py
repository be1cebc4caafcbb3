"""Reading the metadata of a GGUF file without its tensors.

Written for speed of start: `gguf.GGUFReader` makes an array of every token of the vocabulary and takes seconds for
what takes a tenth of one here. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from octavo.models.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata by key: numbers, bools, strings and lists of these.

    Raises ModelError where the file is no GGUF file of version 2 or 3, or is cut short or damaged.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).metadata()
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

    def metadata(self) -> dict[str, Any]:
        if self._data[:4] != _MAGIC:
            raise _FormatError("not a GGUF file")
        self._at = 4
        (version,) = self._unpack("I")
        if version not in _VERSIONS:
            raise _FormatError(f"GGUF version {version} (or big-endian) is not supported, only {_VERSIONS}")
        _tensors, count = self._unpack("QQ")
        return {self._string(): self._value(self._unpack("I")[0]) for _ in range(count)}

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._unpack(self._format(kind))[0]
        element, count = self._unpack("IQ")
        if element == _STRING:
            return [self._string() for _ in range(count)]
        if element == _ARRAY:
            return [self._value(_ARRAY) for _ in range(count)]
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

    def _unpack(self, code: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(f"<{code}")
        return values

    @staticmethod
    def _format(kind: int) -> str:
        if kind not in _SCALARS:
            raise _FormatError(f"metadata of unknown type {kind}")
        return _SCALARS[kind]
