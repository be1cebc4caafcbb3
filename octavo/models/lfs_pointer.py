"""Pointers of Git LFS: what lies in the place of large files where a model was cloned without them."""

from __future__ import annotations

from pathlib import Path

from octavo.models.errors import ModelError

_BEGINNING = b"version https://git-lfs"
_MOST_BYTES = 1024


def check_no_pointer(path: Path) -> None:
    """Raise ModelError where a file is a pointer to it. What is wrong with it otherwise is for its reader to tell."""
    try:
        is_pointer = path.stat().st_size <= _MOST_BYTES and path.read_bytes().startswith(_BEGINNING)
    except OSError:
        return
    if is_pointer:
        raise ModelError(
            f"{path} is a pointer of Git LFS and not the file itself: run `git lfs pull` in its folder, or fetch the "
            "file again"
        )
