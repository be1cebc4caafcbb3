"""Finds out which build of torch pip would install: torch_build.py CONSTRAINTS prints `cpu` or `gpu`.

It asks pip without installing anything. The CPU build carries `+cpu` in its version, or needs no CUDA package on this
machine. A pin without the local label is what makes both answers possible.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pip._vendor.packaging.requirements import Requirement

_CUDA_PACKAGES = ("nvidia-", "cuda-")


def pinned_torch(constraints: Path) -> str:
    """Return the torch requirement in a constraints file."""
    return next(line.strip() for line in constraints.read_text().splitlines() if line.startswith("torch=="))


def is_cpu_build(metadata: dict[str, Any]) -> bool:
    """Tell from a distribution's metadata, as in pip's installation report."""
    if metadata["version"].endswith("+cpu"):
        return True
    needs = [Requirement(text) for text in metadata.get("requires_dist", ())]
    return not any(
        need.name.lower().startswith(_CUDA_PACKAGES) and (need.marker is None or need.marker.evaluate({"extra": ""}))
        for need in needs
    )


def main(constraints: str) -> None:
    """Print the answer; `gpu` also where pip finds nothing, so that the installation itself says what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--dry-run"]
        command += ["--ignore-installed", "--no-deps", "--report", str(report), pinned_torch(Path(constraints))]
        found = subprocess.run(command, stdout=sys.stderr, check=False).returncode == 0
        metadata = json.loads(report.read_text())["install"][0]["metadata"] if found else None
    print("cpu" if metadata is not None and is_cpu_build(metadata) else "gpu")


if __name__ == "__main__":
    main(sys.argv[1])
