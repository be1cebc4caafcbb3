"""Programs: the calls of a step, written down in a run that computes nothing, and made again by one call.

While a body is recorded its ops allocate and call as ever, but the calls only go into a list. From that list follows
how long each buffer is needed, and so where in one arena it may lie: those that are never needed at once share memory.
A program is the list with these addresses; a later step puts its inputs' addresses in and runs it. The idea is that of
CUDA graphs; the buffers are laid out anew because memory is not to grow with the number of layers and of programs.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from executor_svc.kernels.native.library import ADDRESS, FLOAT, INT64, NativeLibrary, Recorder

ALIGNMENT = 64
"""Bytes: a line of the cache."""

_ALLOCATIONS = frozenset({"empty", "empty_like", "new_empty"})
_VIEWS = frozenset(
    [
        "__getitem__",
        "chunk",
        "contiguous",
        "detach",
        "expand",
        "flatten",
        "narrow",
        "reshape",
        "select",
        "split",
        "squeeze",
        "t",
        "transpose",
        "unflatten",
        "unsqueeze",
        "view",
    ]
)
_QUERIES = frozenset(
    [
        "__get__",
        "__len__",
        "data_ptr",
        "dim",
        "element_size",
        "is_contiguous",
        "nelement",
        "numel",
        "size",
        "storage_offset",
        "stride",
        "untyped_storage",
    ]
)
"""Names of what torch may be asked while a body is recorded. None of it reads or writes what a tensor holds."""


class NotRecordableError(Exception):
    """The body computes by something else than calls of the library that can be part of programs."""


class Batch(Protocol):
    """What changes from step to step beside the inputs."""

    address: int
    """Where the kernels read of it. Calls have the address itself as argument."""


class Arena:
    """Memory that programs share: one runs at a time."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, num_bytes: int) -> None:
        """Make room. The memory may move."""
        if num_bytes > len(self.memory):
            self.memory = torch.empty(num_bytes, dtype=torch.uint8)


@dataclass
class _Buffer:
    """A tensor's memory while it is recorded."""

    address: int
    num_bytes: int
    first: int = -1
    """The call that has it first."""
    last: int = -1
    offset: int = 0


class _Mode(TorchFunctionMode):
    """Notes what is allocated; refuses what computes. A TorchDispatchMode would see more, and import half of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__
        if name in _ALLOCATIONS:
            self.tensors.append(result)
        elif name not in _QUERIES and not (name in _VIEWS and _is_view(result, args)):
            raise NotRecordableError(f"{name} of torch computes something")
        return result


@dataclass
class _Call:
    function: int
    words: list[int]
    pointers: list[int]
    """Which of the words are addresses."""


class Recording(Recorder):
    """Takes the calls of one body."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def add(self, name: str, of_words: int | None, types: Sequence[type], arguments: Sequence[Any]) -> None:
        """See Recorder."""
        if of_words is None:
            raise NotRecordableError(f"{name} cannot be part of a program")
        words, pointers = [], []
        for index, (kind, value) in enumerate(zip(types, arguments, strict=True)):
            if kind is ADDRESS:
                pointers.append(index)
            words.append(_float_word(value) if kind is FLOAT else int(value or 0))
        self.calls.append(_Call(of_words, words, pointers))


def record_program(
    library: NativeLibrary,
    arena: Arena,
    body: Callable[[Sequence[Tensor], Any], Tensor],
    inputs: Sequence[Tensor],
    batch: Batch,
) -> Program:
    """Record what `body` does with inputs of these shapes. Nothing is computed. Raises NotRecordableError."""
    recording, mode = Recording(), _Mode()
    with library.recorded_by(recording), mode:
        output = body(inputs, batch)
    buffers = sorted(
        (_Buffer(tensor.data_ptr(), tensor.untyped_storage().nbytes()) for tensor in mode.tensors if tensor.numel()),
        key=lambda buffer: buffer.address,
    )
    return _Layout(recording.calls, buffers, inputs, batch).program(library, arena, output)


class Program:
    """Calls with the places where addresses go in."""

    def __init__(
        self,
        library: NativeLibrary,
        arena: Arena,
        calls: np.ndarray[Any, np.dtype[np.int64]],
        words: np.ndarray[Any, np.dtype[np.int64]],
        *,
        in_arena: tuple[Sequence[int], Sequence[int]],
        in_inputs: Sequence[tuple[Sequence[int], Sequence[int]]],
        output: Callable[[Tensor], Tensor],
        arena_bytes: int,
    ) -> None:
        self._run = library.function("octavo_run_program", ADDRESS, INT64, ADDRESS)
        self._raise_host_error = library.raise_host_error
        self._arena = arena
        self._calls = calls
        self._words = words
        self._arguments = calls.ctypes.data, len(calls), words.ctypes.data
        self._in_arena = _places(in_arena)
        self._in_inputs = [_places(places) for places in in_inputs]
        self._output = output
        self._base: int | None = None
        arena.reserve(arena_bytes)

    def run(self, inputs: Sequence[Tensor], batch: Batch) -> Tensor:
        """Run the body on these inputs. The result lies in the arena."""
        words = self._words
        memory = self._arena.memory
        if memory.data_ptr() != self._base:
            self._base = memory.data_ptr()
            places, offsets = self._in_arena
            words[places] = offsets + self._base
            self._result = self._output(memory)
        for (places, offsets), tensor in zip(self._in_inputs, inputs, strict=False):
            words[places] = offsets + tensor.data_ptr()
        places, offsets = self._in_inputs[-1]
        words[places] = offsets + batch.address
        self._run(*self._arguments)
        self._raise_host_error()
        return self._result


class _Layout:
    """Works out where everything that the calls have addresses of lies."""

    def __init__(
        self, calls: Sequence[_Call], buffers: Sequence[_Buffer], inputs: Sequence[Tensor], batch: Batch
    ) -> None:
        self._calls = calls
        self._buffers = buffers
        self._starts = [buffer.address for buffer in buffers]
        self._sources = [(tensor.data_ptr(), tensor.numel() * tensor.element_size()) for tensor in inputs]
        self._sources.append((batch.address, 1))

    def program(self, library: NativeLibrary, arena: Arena, output: Tensor) -> Program:
        words: list[int] = []
        calls: list[tuple[int, int]] = []
        uses: list[tuple[int, _Buffer, int]] = []
        in_inputs: list[tuple[list[int], list[int]]] = [([], []) for _ in self._sources]
        for index, call in enumerate(self._calls):
            calls.append((call.function, len(words)))
            for place in call.pointers:
                address = call.words[place]
                buffer = self._buffer_at(address)
                source = self._source_at(address)
                if buffer is not None:
                    buffer.first = index if buffer.first < 0 else buffer.first
                    buffer.last = index
                    uses.append((len(words) + place, buffer, address - buffer.address))
                elif source is not None:
                    in_inputs[source][0].append(len(words) + place)
                    in_inputs[source][1].append(address - self._sources[source][0])
            words.extend(call.words)
        result = self._buffer_at(output.data_ptr())
        if result is None or result.last < 0:
            raise NotRecordableError("the result is not what an op gave")
        result.last = len(self._calls)
        arena_bytes = self._place_buffers()
        start = result.offset + output.data_ptr() - result.address
        return Program(
            library,
            arena,
            np.array(calls, dtype=np.int64).reshape(-1, 2),
            np.array(words, dtype=np.int64),
            in_arena=([place for place, _, _ in uses], [buffer.offset + extra for _, buffer, extra in uses]),
            in_inputs=in_inputs,
            output=lambda memory: _strided(memory, start, output),
            arena_bytes=arena_bytes,
        )

    def _buffer_at(self, address: int) -> _Buffer | None:
        index = bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        buffer = self._buffers[index]
        return buffer if address < buffer.address + buffer.num_bytes else None

    def _source_at(self, address: int) -> int | None:
        for index, (start, num_bytes) in enumerate(self._sources):
            if start <= address < start + num_bytes:
                return index
        return None

    def _place_buffers(self) -> int:
        """Give each buffer its offset, and return what all take.

        Layers repeat: a buffer's place goes to the next one of the same size.
        """
        begins: dict[int, list[_Buffer]] = {}
        ends: dict[int, list[_Buffer]] = {}
        for buffer in self._buffers:
            if buffer.last >= 0:
                begins.setdefault(buffer.first, []).append(buffer)
                ends.setdefault(buffer.last, []).append(buffer)
        free: dict[int, list[int]] = {}
        end = 0
        for index in range(len(self._calls) + 1):
            for buffer in begins.get(index, ()):
                places = free.get(buffer.num_bytes)
                if places:
                    buffer.offset = places.pop()
                else:
                    buffer.offset = end
                    end += -(-buffer.num_bytes // ALIGNMENT) * ALIGNMENT
            for buffer in ends.get(index, ()):
                free.setdefault(buffer.num_bytes, []).append(buffer.offset)
        return end


def _is_view(result: Any, args: tuple[Any, ...]) -> bool:
    """Whether all that an op gave lies in the memory of what it took."""
    given = [each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)]
    results = result if isinstance(result, (tuple, list)) else (result,)
    return all(isinstance(each, Tensor) and each.untyped_storage().data_ptr() in given for each in results)


def _strided(memory: Tensor, start: int, like: Tensor) -> Tensor:
    typed = memory[start : start + like.numel() * like.element_size()].view(like.dtype)
    return typed.view(like.shape)


def _places(
    places: tuple[Sequence[int], Sequence[int]],
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.int64]]]:
    return np.array(places[0], dtype=np.int64), np.array(places[1], dtype=np.int64)


def _float_word(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])
