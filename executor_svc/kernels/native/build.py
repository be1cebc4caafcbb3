"""Compiling the kernels, once for each instruction set and state of the sources."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from executor_svc.kernels.native.isa import InstructionSet
from executor_svc.kernels.native.sealed import is_whole, seal
from octavo.home import octavo_home

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent.parent
"""Every .cpp file below it is compiled."""
BUILT_AHEAD_IN = "OCTAVO_KERNELS_DIR"
"""Environment variable: a folder of libraries that were built ahead. Looked into first, never written to."""
COMPILERS = ("g++", "clang++", "c++")
"""Tried in this order, after $CXX."""

_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-pthread", "-fno-math-errno", "-fvisibility=hidden", "-Wall", "-Wextra")
_NUM_KEPT = 8
"""Libraries of an instruction set that stay beside a new one: other versions may be installed on the machine."""
_TIME_LIMIT = 600
"""Seconds for one source. A minute is far too long already; this one ends a compiler that hangs."""


class KernelBuildError(RuntimeError):
    """There is no compiler, or it failed. The message says what to do."""


def find_library(isa: InstructionSet) -> Path:
    """Return the library for an instruction set: built ahead, built before, or built now (10 to 20 seconds).

    One that was built before and is damaged is built again. Raises KernelBuildError. Two processes that come at once
    build it once.
    """
    name = library_name(isa)
    ahead = os.environ.get(BUILT_AHEAD_IN)
    if ahead and (Path(ahead) / name).is_file():
        return _checked(Path(ahead) / name)
    folder = octavo_home() / "kernels"
    library = folder / name
    try:
        if is_whole(library):
            return library
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{name}.lock"):
            if not is_whole(library):
                build(isa, library)
                _forget_old(folder, isa)
    except OSError as error:
        raise KernelBuildError(f"the compiled kernels cannot be kept in {folder}: {error}; set OCTAVO_HOME") from None
    return library


def library_name(isa: InstructionSet) -> str:
    """Return the file name of the library that the sources of now give: the set and a hash of all that decides it."""
    digest = hashlib.sha256(repr((_FLAGS, isa.flags)).encode())
    for path in sorted([*SOURCES.rglob("*.cpp"), *SOURCES.rglob("*.h")]):
        digest.update(f"{path.relative_to(SOURCES)}\n".encode() + path.read_bytes())
    return f"octavo-{isa.name}-{digest.hexdigest()[:16]}.so"


def build(isa: InstructionSet, library: Path) -> None:
    """Compile every source and link them. The file appears whole or not at all. Raises KernelBuildError."""
    compiler = find_compiler()
    # The largest first: no processor waits long for the last.
    sources = sorted(SOURCES.rglob("*.cpp"), key=lambda path: path.stat().st_size, reverse=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=library.parent) as scratch:
        objects = [Path(scratch) / f"{index}.o" for index in range(len(sources))]
        commands = [
            [compiler, *_FLAGS, *isa.flags, "-c", str(source), "-o", str(obj)]
            for source, obj in zip(sources, objects, strict=True)
        ]
        sizes = [source.stat().st_size for source in sources]
        _tell(0, sum(sizes))
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for index, _ in enumerate(pool.map(_run, commands), 1):
                _tell(sum(sizes[:index]), sum(sizes))
        whole = Path(scratch) / library.name
        _run([compiler, "-shared", "-pthread", *map(str, objects), "-o", str(whole)])
        seal(whole)
        whole.replace(library)


def _tell(done: int, total: int) -> None:
    # As octavo.rpc.stages does: who waits for the first start sees that the sources are compiled, and how far that is.
    logger.info("compiling the kernels", extra={"fields": {"stage": "kernels", "done": done, "total": total}})


def find_compiler() -> str:
    """Return the path of a C++ compiler. Raises KernelBuildError where there is none."""
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    missing = f"CXX={wanted} is not a program" if wanted else "there is no C++ compiler"
    raise KernelBuildError(
        f"{missing}, and the kernels are compiled at the first start: install one (Debian: apt install g++), or start "
        "with --kernels reference, which is slow"
    )


def _checked(library: Path) -> Path:
    """Return a library that was built ahead. Raises KernelBuildError where it is damaged."""
    try:
        if is_whole(library):
            return library
        why = "is damaged"
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
    command = f"python -m executor_svc.kernels.native {library.parent}"
    raise KernelBuildError(f"{library} {why}: build it again ({command}), or unset {BUILT_AHEAD_IN}")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"{command[0]} could not compile the kernels: {error}") from None
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        errors = [line for line in said if "error" in line] or said
        raise KernelBuildError(
            f"{command[0]} could not compile the kernels (g++ 11 or clang++ 14 and later can): {'; '.join(errors[:3])}"
        )


def _forget_old(folder: Path, isa: InstructionSet) -> None:
    """Remove all libraries of an instruction set but the newest. A process that has loaded one keeps it."""
    newest_first = sorted(folder.glob(f"octavo-{isa.name}-*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in newest_first[1 + _NUM_KEPT :]:
        path.unlink(missing_ok=True)
        Path(f"{path}.lock").unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
