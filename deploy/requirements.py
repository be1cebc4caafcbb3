"""Prints what a service needs, one requirement a line: requirements.py [EXTRA ...], beside pyproject.toml.

An image installs these before the source comes, so that a change of the source does not install them again.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path


def requirements(pyproject: Path, extras: Sequence[str]) -> list[str]:
    """Return the project's requirements and those of `extras`. Raises KeyError where there is no such extra."""
    project = tomllib.loads(pyproject.read_text())["project"]
    return [*project["dependencies"], *(each for extra in extras for each in project["optional-dependencies"][extra])]


if __name__ == "__main__":
    print("\n".join(requirements(Path("pyproject.toml"), sys.argv[1:])))
