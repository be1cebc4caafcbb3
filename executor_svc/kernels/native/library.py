"""The compiled kernels of this process."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from executor_svc.kernels.native.build import KernelBuildError, find_library
from executor_svc.kernels.native.isa import InstructionSet, choose

ADDRESS = ctypes.c_void_p
INT64 = ctypes.c_int64
INT32 = ctypes.c_int32
FLOAT = ctypes.c_float
_HOST_CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
"""A function of words, as programs call it (csrc/program.h)."""


class Recorder(Protocol):
    """Takes calls instead of their being made."""

    def add(self, name: str, of_words: int | None, types: Sequence[type], arguments: Sequence[Any]) -> None:
        """Take the call of a function; `of_words` is the address of its form that takes words, where it has one."""


class _Recording(threading.local):
    recorder: Recorder | None = None
    host_error: BaseException | None = None
    """What a host function raised in a program that this thread runs."""


_recording = _Recording()


@dataclass(frozen=True)
class NativeLibrary:
    """One loaded library. Calls run without Python's lock; the ops of one process run one after the other."""

    name: str
    """The file's, which tells the instruction set and the state of the sources."""
    isa: InstructionSet
    _library: ctypes.CDLL

    def function(self, name: str, *arguments: type, result: type | None = None) -> Callable[..., int]:
        """Return a C function by its name, with the types of its arguments and result.

        What its arguments point to, tensors of the step apart, must live and stay where it is for as long as the op
        does: calls may be recorded.
        """
        function = self._library[name]
        function.argtypes = arguments
        function.restype = result
        of_words = self._address_of_words(name)

        def call(*values: Any) -> Any:
            if _recording.recorder is not None:
                return _recording.recorder.add(name, of_words, arguments, values)
            return function(*values)

        return call

    def host_function(self, name: str, call: Callable[..., None], *arguments: type) -> Callable[..., None]:
        """Return `call`, which takes integers, as if it were a function of the library: it can be part of programs.

        What it raises there comes out of `raise_host_error`, and until then no host function of the thread is called.
        """

        def call_with_words(words: int) -> None:
            if _recording.host_error is not None:
                return
            try:
                call(*(INT64 * len(arguments)).from_address(words))
            except BaseException as error:
                # Nothing may go through the program that called.
                _recording.host_error = error

        entry = _HOST_CALL(call_with_words)
        of_words = ctypes.cast(entry, ctypes.c_void_p).value

        def compute(*values: int, _kept: object = entry) -> None:
            if _recording.recorder is not None:
                _recording.recorder.add(name, of_words, arguments, values)
            else:
                call(*values)

        return compute

    @staticmethod
    def raise_host_error() -> None:
        """Raise what a host function raised in the program that this thread has run."""
        error, _recording.host_error = _recording.host_error, None
        if error is not None:
            raise error

    @contextmanager
    def recorded_by(self, recorder: Recorder) -> Iterator[None]:
        """Hand calls of this thread to `recorder` instead of making them."""
        _recording.recorder = recorder
        try:
            yield
        finally:
            _recording.recorder = None

    def _address_of_words(self, name: str) -> int | None:
        try:
            function = self._library[f"{name}_of_words"]
        except AttributeError:
            return None
        return ctypes.cast(function, ctypes.c_void_p).value

    def num_rounds(self) -> int:
        """Return how many rounds of work the team has done, one or more in each op; any thread may ask, at any time."""
        rounds: int = self._library["octavo_rounds"]()
        return rounds

    def set_threads(self, count: int) -> None:
        """Make the team of compute threads `count` strong, the calling thread of an op included."""
        self.function("octavo_set_threads", ctypes.c_int)(count)


_loaded: dict[str, NativeLibrary] = {}


def num_rounds() -> int:
    """Return how many rounds of work the libraries of this process have done."""
    return sum(library.num_rounds() for library in tuple(_loaded.values()))


def load_library(num_threads: int | None = None, isa: InstructionSet | None = None) -> NativeLibrary:
    """Load the library of an instruction set, by default the chosen one, built first where need be.

    num_threads: compute threads, by default as many as the process may use processors. Raises KernelBuildError and
    InstructionSetError.
    """
    isa = choose() if isa is None else isa
    # A library has one team: loading it twice must not make two.
    if isa.name not in _loaded:
        path = find_library(isa)
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelBuildError(
                f"the compiled kernels cannot be loaded ({error}): set OCTAVO_HOME to a folder that programs may be "
                f"run from, or remove {path.name} there to have it built again"
            ) from None
        loaded.octavo_rounds.restype = INT64
        _loaded[isa.name] = NativeLibrary(path.name, isa, loaded)
    library = _loaded[isa.name]
    library.set_threads(num_threads or len(os.sched_getaffinity(0)))
    return library
