"""Makes the Python stubs of protos/ under a folder: make_stubs.py FOLDER. The committed ones lie under `.`."""

from __future__ import annotations

import importlib.resources
import sys
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).parent.parent / "protos"


def make_stubs(folder: Path) -> None:
    """Write the stubs of every contract under `folder`, which must exist. Raises RuntimeError where protoc refuses."""
    included = importlib.resources.files("grpc_tools") / "_proto"
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{PROTOS}", f"-I{included}", *outputs, *sources]) != 0:
        raise RuntimeError("protoc failed; its own words are above")


if __name__ == "__main__":
    make_stubs(Path(sys.argv[1]))
