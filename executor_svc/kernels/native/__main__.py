"""Builds the kernels of all instruction sets of this kind of machine: python -m executor_svc.kernels.native FOLDER."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from executor_svc.kernels.native.build import KernelBuildError, build, library_name
from executor_svc.kernels.native.isa import INSTRUCTION_SETS


def main(arguments: list[str]) -> int:
    """Build into the directory; return the exit code."""
    if len(arguments) != 1:
        print("usage: python -m executor_svc.kernels.native FOLDER", file=sys.stderr)
        return 2
    directory = Path(arguments[0])
    directory.mkdir(parents=True, exist_ok=True)
    x86 = platform.machine() == "x86_64"
    try:
        for isa in INSTRUCTION_SETS if x86 else INSTRUCTION_SETS[:1]:
            build(isa, directory / library_name(isa))
            print(directory / library_name(isa))
    except KernelBuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
