"""Where Octavo keeps what it downloads and logs: OCTAVO_HOME, or ~/.cache/octavo."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "OCTAVO_HOME"


def octavo_home(environ: Mapping[str, str] | None = None) -> Path:
    """Return the home as an absolute path. It need not exist yet."""
    environ = os.environ if environ is None else environ
    given = environ.get(VARIABLE, "").strip()
    return Path(given).expanduser().absolute() if given else Path("~/.cache/octavo").expanduser()
