"""A device that is none: torch's CPU tensors stand for its memory, and every rule of executor_svc.device is watched.

What is launched is computed at once, so results are the real ones. What could have gone wrong on a device, where
streams and host run side by side, is worked out from who waited for whom: each access of a piece of memory must lie
behind the accesses before it. So a missing wait is found every time, and not only where the timing happens to be bad.

Run everything inside `watching()`. Tensors made there without naming a device, or from arrays, are the host's; all
others are the device's, those too that were there before.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from device_watch import CaptureError, Recorded, RuleError, Watch
from torch import Tensor

from executor_svc.device import Bytes, DeviceMemory, Event, Graph, Pinned, Stream

POISON = 0xA5
"""What page-locked memory holds before a copy to it has ended."""


@dataclass
class FakeEvent:
    """What had been launched, on all streams as far as its own knew of them, when it was recorded."""

    device: FakeDevice
    seen: dict[str, int]
    time: int
    timed: bool

    def synchronize(self) -> None:
        """See Event. Waits at the gate where a test holds the device, unless the host has come past it before."""
        self.device.watch.no_capture("waiting for an event")
        if self.device.watch.host_knows(self.seen):
            return
        assert self.device.gate.wait(self.device.gate_seconds), "the test holds the device"
        if self.device.lost is not None:
            raise self.device.lost
        self.device.watch.host_waited(self.seen)


@dataclass(frozen=True)
class FakeStream:
    """A stream: its name."""

    device: FakeDevice
    name: str

    def record(self, *, timed: bool = False) -> Event:
        """See Stream."""
        device = self.device
        device.watch.no_capture("recording an event")
        return FakeEvent(device, dict(device.watch.seen[self.name]), device.watch.launches, timed)

    def wait(self, event: Event) -> None:
        """See Stream."""
        assert isinstance(event, FakeEvent)
        self.device.watch.waited(self.name, event.seen)


class FakePinned:
    """Page-locked memory that knows of the copies from and to it."""

    def __init__(self, watch: Watch, size: int) -> None:
        self._watch = watch
        self.memory: Bytes = np.full(size, POISON, dtype=np.uint8)
        self._copy: tuple[str, int] | None = None
        self._arriving: Bytes | None = None
        self._leaving: Bytes | None = None

    def bytes(self) -> Bytes:
        """See Pinned. Raises RuleError while a copy is under way, and where one met a change."""
        if self._copy is not None:
            stream, launch = self._copy
            if not self._watch.host_saw(stream, launch):
                raise RuleError("page-locked memory is used before the host has waited for its copy")
            self._settle()
        return self.memory

    def leaves(self, size: int) -> None:
        """A copy from it begins."""
        if self._copy is not None and self._watch.host_saw(*self._copy):
            self._settle()
        self._leaving = self.memory[:size].copy()
        self._copy = self._watch.launched_last()

    def arrives(self, data: Bytes) -> None:
        """A copy to it begins."""
        self._arriving = data
        self._copy = self._watch.launched_last()

    def _settle(self) -> None:
        if self._leaving is not None and not np.array_equal(self.memory[: len(self._leaving)], self._leaving):
            raise RuleError("page-locked memory was written while a copy from it was under way")
        if self._arriving is not None:
            self.memory[: len(self._arriving)] = self._arriving
        self._copy = self._arriving = self._leaving = None


@dataclass
class FakeGraph:
    """Captured launches."""

    watch: Watch
    recorded: list[Recorded]
    held: dict[int, int]
    """How many held each piece of memory that was there before."""

    def replay(self) -> None:
        """See Graph. Raises RuleError where memory that it reads or writes has been given back."""
        self.watch.check_held(self.held)
        for each in self.recorded:
            self.watch.replay(each)


@dataclass
class FakeDevice:
    """See Device. `total` bytes of memory, of which `others` has some; kernels come from `watch.kernels`."""

    total: int = 1 << 34
    others: int = 1 << 20
    name: str = "a fake card"
    torch_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    lost: Exception | None = None
    """What waiting for the device raises."""
    gate_seconds: float = 30.0
    """How long a wait stands at the gate until it fails."""

    def __post_init__(self) -> None:
        self.watch = Watch(("compute", "copy"), self.total)
        self.compute: Stream = FakeStream(self, "compute")
        self.copy: Stream = FakeStream(self, "copy")
        self.gate = threading.Event()
        """Cleared, the device's work does not end."""
        self.gate.set()
        self.graphs: list[FakeGraph] = []
        self.bound: set[str] = set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what this thread does."""
        with self.watch.modes():
            yield

    def bind(self) -> None:
        """See Device."""
        self.bound.add(threading.current_thread().name)

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """See Device."""
        assert isinstance(stream, FakeStream)
        before, self.watch.stream = self.watch.stream, stream.name
        try:
            yield
        finally:
            self.watch.stream = before

    def pinned(self, size: int) -> Pinned:
        """See Device."""
        self.watch.no_capture("taking page-locked memory")
        return FakePinned(self.watch, size)

    def send(self, source: Pinned, target: Tensor, size: int) -> None:
        """See Device."""
        assert isinstance(source, FakePinned)
        self.watch.no_capture("copying from the host")
        assert target.dtype == torch.uint8
        self.watch.launch("send", [], [target])
        with self.watch.unwatched():
            target[:size].copy_(torch.from_numpy(source.memory[:size].copy()))
        source.leaves(size)

    def put(self, array: npt.NDArray[np.generic]) -> Tensor:
        """See Device."""
        self.watch.no_capture("copying from the host")
        with self.watch.unwatched():
            tensor = torch.from_numpy(np.array(array, order="C"))
        self.watch.launch("put", [], [tensor], fresh=[tensor])
        return tensor

    def fetch(self, source: Tensor) -> Pinned:
        """See Device."""
        self.watch.no_capture("copying to the host")
        assert source.is_contiguous()
        target = FakePinned(self.watch, source.nbytes)
        self.watch.launch("fetch", [source], [])
        with self.watch.unwatched():
            target.arrives(source.reshape(-1).view(torch.uint8).numpy().copy())
        return target

    def seconds_between(self, begin: Event, end: Event) -> float:
        """See Device: a launch takes a millisecond."""
        assert isinstance(begin, FakeEvent)
        assert isinstance(end, FakeEvent)
        for event in (begin, end):
            if not event.timed or not self.watch.host_knows(event.seen):
                raise RuleError("an event that is not timed, or has not been waited for, has no time")
        return (end.time - begin.time) / 1000

    def capture(self, launch: Callable[[], None]) -> Graph:
        """See Device."""
        with self.on(self.compute):
            recorded, held = self.watch.capture(launch)
        self.graphs.append(FakeGraph(self.watch, recorded, held))
        return self.graphs[-1]

    def memory(self) -> DeviceMemory:
        """See Device: the peak is as if nothing that a step makes were given back before its end."""
        self.watch.no_capture("asking for memory")
        watch = self.watch
        return DeviceMemory(
            total=self.total,
            free=self.total - self.others - watch.in_use,
            held=watch.in_use,
            peak=watch.in_use + watch.made,
            in_use=watch.in_use,
        )

    def reset_peak(self) -> None:
        """See Device."""
        self.watch.made = 0

    def give_back(self) -> None:
        """See Device."""
        self.watch.no_capture("giving memory back")

    def synchronize(self) -> None:
        """See Device."""
        self.watch.no_capture("waiting for the device")
        if self.lost is not None:
            raise self.lost
        for seen in self.watch.seen.values():
            self.watch.host_waited(seen)

    def is_lost(self, error: Exception) -> bool:
        """See Device: broken rules are not to be taken for failed steps."""
        return isinstance(error, RuleError | CaptureError) or error is self.lost
