"""Compiled libraries on disk: each ends with a hash of the rest, so that what a full disk or a crash has left of one is
never loaded. The loader looks at no byte behind the segments.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_MARK = b"octavo-whole"
_SIZE = len(_MARK) + hashlib.sha256().digest_size


def seal(library: Path) -> None:
    """Put the hash behind a new library, and both on the disk. Raises OSError."""
    with library.open("r+b") as file:
        digest = hashlib.sha256(file.read()).digest()
        file.write(_MARK + digest)
        file.flush()
        os.fsync(file.fileno())


def is_whole(library: Path) -> bool:
    """Whether a library is there, as it was sealed. Raises OSError where it cannot be read."""
    if not library.is_file():
        return False
    data = memoryview(library.read_bytes())
    return data[-_SIZE:] == _MARK + hashlib.sha256(data[:-_SIZE]).digest()
