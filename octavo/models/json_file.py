"""A model's files in JSON, each one object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.models.errors import ModelError
from octavo.models.lfs_pointer import check_no_pointer


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a file. Raises ModelError where there is none, or none that can be read."""
    check_no_pointer(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    if not isinstance(document, dict):
        raise ModelError(f"{path} holds no JSON object")
    return document


def read_object_if_there(path: Path) -> dict[str, Any]:
    """Return the object in a file, an empty one where there is no such file. Raises as read_object does."""
    return read_object(path) if path.is_file() else {}
