"""What a pipelined step needs of an accelerator: the whole of it, so that everything that needs one stands behind this.

`cuda.py` is NVIDIA's (and, by torch's own names, AMD's); the tests have one that is none, and watches the rules:

- What is launched on one stream runs in the order of the launches. Two streams know nothing of one another until one
  waits for an event that was recorded on the other.
- Page-locked memory belongs to the copy from the moment that it is asked for until the host has waited for an event
  recorded behind it. Until then the host neither writes nor reads it.
- A tensor lives in the memory of the stream that it was made on, and is dropped only when no other stream uses it.
- The host reads nothing of the device but by `fetch`, and gives it nothing but by `put` and `send`.
- A graph holds addresses: what it reads and writes stays where it was at the capture for as long as it is replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.rpc.settings import SettingsError

Bytes = npt.NDArray[np.uint8]


class DeviceLostError(RuntimeError):
    """The device has failed, and nothing more can be run on it by this process."""


class DeviceUnusableError(SettingsError):
    """The device that --device names is there and cannot be opened; the message says why."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that the device has no memory left, be it torch's allocator that says so or, each with an
    error of its own, the driver, a library of products, or Triton where it loads a kernel.
    """
    message = str(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in message or "CUBLAS_STATUS_ALLOC_FAILED" in message)
    )


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of the device's memory."""

    total: int
    free: int
    """That nobody has taken: no process, and no allocator for later use."""
    held: int
    """Taken by this process's allocator, in use or kept for later."""
    peak: int
    """The most that tensors of this process took at a time since `reset_peak`."""
    in_use: int
    """What its tensors take now."""

    @property
    def others(self) -> int:
        """Taken by other processes, and by what this one's driver and libraries need beside tensors."""
        return self.total - self.free - self.held


class Event(Protocol):
    """A place in a stream's work."""

    def synchronize(self) -> None:
        """Have this thread wait until the device has come past it; others go on. Raises DeviceLostError."""


class Stream(Protocol):
    """A queue of work on the device."""

    def record(self, *, timed: bool = False) -> Event:
        """Make an event behind all that was launched on the stream so far. `timed`: seconds_between may take it."""

    def wait(self, event: Event) -> None:
        """Hold back all that is launched on the stream from now on until the device has come past the event."""


class Pinned(Protocol):
    """Page-locked host memory, which copies read and write while the host does something else."""

    def bytes(self) -> Bytes:
        """Give the memory, uint8 [size], to be written or read. No copy from or to it may be under way."""


class Graph(Protocol):
    """Launches that were captured, to be made again at once."""

    def replay(self) -> None:
        """Launch all of them on the current stream, with the addresses and numbers that they were captured with."""


class Device(Protocol):
    """One accelerator. Its streams and memory are used by one thread, but events, which any thread may wait for."""

    name: str
    """What people call it."""
    torch_device: torch.device
    """Where torch makes tensors that belong to it."""
    compute: Stream
    """Runs the steps."""
    copy: Stream
    """Brings the inputs of a step while another is computed."""

    def bind(self) -> None:
        """Make it the device of the calling thread."""

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Make a stream the current one: what torch launches and allocates inside belongs to it."""

    def pinned(self, size: int) -> Pinned:
        """Take so many bytes of page-locked memory, to keep. Raises RuntimeError where the system gives none."""

    def send(self, source: Pinned, target: Tensor, size: int) -> None:
        """Start copying the first bytes to a tensor, uint8 [at least size], on the current stream."""

    def put(self, array: npt.NDArray[np.generic]) -> Tensor:
        """Start copying an array to a new tensor, on the current stream. The array may be changed at once."""

    def fetch(self, source: Tensor) -> Pinned:
        """Start copying a contiguous tensor to page-locked memory of its own, on the current stream."""

    def seconds_between(self, begin: Event, end: Event) -> float:
        """Give the time between two timed events that the device has come past. Negative where `end` came first."""

    def capture(self, launch: Callable[[], None]) -> Graph:
        """Call `launch`, and keep what it launches on `compute` as a graph instead of running it.

        All graphs of a device share memory for what they allocate: a tensor made inside keeps its place as long as it
        is held, and its content until another graph is replayed. `launch` has run before with the same shapes, so that
        nothing is compiled, looked up or set up now; it neither waits for the device nor copies from or to the host.
        Raises RuntimeError where it does.
        """

    def memory(self) -> DeviceMemory:
        """Ask how its memory is used."""

    def reset_peak(self) -> None:
        """Count the peak from now on."""

    def give_back(self) -> None:
        """Give what the allocator keeps for later back to the device."""

    def synchronize(self) -> None:
        """Wait until all that was launched has ended. Raises DeviceLostError."""

    def is_lost(self, error: Exception) -> bool:
        """Whether an error means that the device has failed, and not only what was asked of it. May wait for it."""
