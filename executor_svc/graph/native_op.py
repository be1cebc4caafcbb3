"""Compiling a custom operator's own source: C++ by the compiler of the CPU kernels, CUDA by nvcc.

A C++ source includes octavo_op.h, which has the vectors, the compute threads and the programs of Octavo's own kernels:
its functions run on the same threads, and may be part of recorded steps.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor_svc.kernels.native.build import SOURCES, KernelBuildError, find_compiler, find_library
from executor_svc.kernels.native.isa import choose
from executor_svc.kernels.native.library import NativeLibrary
from executor_svc.kernels.native.sealed import is_whole, seal
from octavo.home import octavo_home

_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-fvisibility=hidden")
_TIME_LIMIT = 300
"""Seconds for a compiler."""


class NativeOpError(RuntimeError):
    """A source cannot be compiled or loaded. The message says why."""


@dataclass(frozen=True)
class Cpp:
    """A version in C++."""

    source: Path
    make: Callable[[NativeLibrary], Callable[..., Any]]
    """Makes the op out of the functions of the compiled source, see NativeLibrary.function."""

    def load(self) -> Callable[..., Any]:
        """Compile, where this source was not compiled before, and load. Raises NativeOpError."""
        isa = choose()
        try:
            compiler = find_compiler()
        except KernelBuildError as error:
            raise NativeOpError(str(error)) from None
        include = SOURCES / "custom"
        state = b"".join(path.read_bytes() for path in sorted(SOURCES.rglob("*.h")))
        command = [compiler, *_FLAGS, *isa.flags, f"-I{include}"]
        library = _loaded(self.source, command, isa.name, state)
        # The kernel set has loaded it: this is the same one, and its threads.
        own = ctypes.CDLL(str(find_library(isa)))
        try:
            join = library.octavo_op_join
        except AttributeError:
            raise NativeOpError(f"{self.source.name} does not include octavo_op.h") from None
        shared = ("octavo_run_on_team", "octavo_team_size", "octavo_team_index")
        join.argtypes, join.restype = (ctypes.c_void_p,) * len(shared), None
        join(*(ctypes.cast(own[name], ctypes.c_void_p) for name in shared))
        return self.make(NativeLibrary(self.source.name, isa, library))


@dataclass(frozen=True)
class Cuda:
    """A version in CUDA: compiled where nvcc is, run on a GPU alone."""

    source: Path
    make: Callable[[ctypes.CDLL], Callable[..., Any]]
    """Makes the op out of the compiled source."""

    def load(self) -> Callable[..., Any]:
        """Compile, where this source was not compiled before, and load. Raises NativeOpError."""
        nvcc = shutil.which("nvcc")
        if nvcc is None:
            raise NativeOpError(f"{self.source.name} is CUDA, and there is no nvcc: install the CUDA toolkit")
        command = [nvcc, "-O3", "-shared", "-Xcompiler", "-fPIC", "-arch=native"]
        return self.make(_loaded(self.source, command, "cuda", b""))


def _loaded(source: Path, command: list[str], kind: str, state: bytes) -> ctypes.CDLL:
    """Load the library of a source, compiled first where need be. Raises NativeOpError."""
    library = _compiled(source, command, kind, state)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        # A symbol that nobody defines: a compiler does not see that in a shared library.
        raise NativeOpError(f"{source.name} compiles, and cannot be loaded: {error}") from None


def _compiled(source: Path, command: list[str], kind: str, state: bytes) -> Path:
    """Return the library of a source, compiled once for each state of it and of what it includes."""
    try:
        text = source.read_bytes()
    except OSError as error:
        raise NativeOpError(f"{source} cannot be read: {error.strerror}") from None
    digest = hashlib.sha256(repr(command).encode() + text + state).hexdigest()[:16]
    folder = octavo_home() / "kernels"
    library = folder / f"op-{source.stem}-{kind}-{digest}.so"
    try:
        if is_whole(library):
            return library
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".op-", dir=folder) as scratch:
            whole = Path(scratch) / library.name
            done = subprocess.run(
                [*command, str(source), "-o", str(whole)],
                capture_output=True,
                text=True,
                timeout=_TIME_LIMIT,
                check=False,
            )
            if done.returncode != 0:
                said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
                errors = [line for line in said if "error" in line] or said
                raise NativeOpError(f"{source.name} does not compile: {'; '.join(errors[:3])}")
            seal(whole)
            whole.replace(library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeOpError(f"{source.name} cannot be compiled: {error}") from None
    return library
