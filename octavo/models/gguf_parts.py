"""GGUF models that lie in several files, as `llama-gguf-split` cuts the larger ones: NAME-00001-of-00003.gguf, ...

The first part has the metadata of the whole model, the others no more than which they are. Each says where its own
tensors lie.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.models.errors import ModelError

_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")
_MOST_PARTS = 1024


def whole_name(stem: str) -> str:
    """Return a file's name without what tells which part it is."""
    match = _PART.fullmatch(stem)
    return match["name"] if match else stem


def find_parts(path: Path, metadata: Mapping[str, Any]) -> tuple[Path, ...]:
    """Return the files of the model whose file `path` has this metadata, `path` first; itself alone where it is whole.

    Raises ModelError where it is not the first part, does not bear a part's name, or where others are missing.
    """
    count = _number(path, metadata, "split.count", 0)
    if count in (0, 1):
        return (path,)
    match = _PART.fullmatch(path.stem)
    number = _number(path, metadata, "split.no", 0)
    if match is None or (int(match["number"]), int(match["count"])) != (number + 1, count) or count > _MOST_PARTS:
        raise ModelError(
            f"{path} is part {number + 1} of {count}: the parts must have the names that they were given, "
            f"NAME-00001-of-{count:05d}.gguf and so on, and lie side by side"
        )
    parts = tuple(path.with_name(f"{match['name']}-{each:05d}-of-{count:05d}.gguf") for each in range(1, count + 1))
    if number:
        raise ModelError(f"{path} is part {number + 1} of {count}: give the first, {parts[0].name}")
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ModelError(f"{path} is one of {count} parts, and {', '.join(missing[:4])} are missing beside it")
    return parts


def check_part(path: Path, metadata: Mapping[str, Any], index: int, count: int) -> None:
    """Raise ModelError where the file at `path` is not part `index`, counted from 0, of `count`."""
    found = _number(path, metadata, "split.no", 0), _number(path, metadata, "split.count", 0)
    if found != (index, count):
        raise ModelError(
            f"{path} says that it is part {found[0] + 1} of {found[1]}, not {index + 1} of {count}: it belongs to "
            "another model, or is damaged"
        )


def _number(path: Path, metadata: Mapping[str, Any], key: str, default: int) -> int:
    value = metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ModelError(f"{path}: {key} is {value!r}, not a whole number: the file is damaged")
    return value
