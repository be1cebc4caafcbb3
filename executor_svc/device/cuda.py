"""NVIDIA's GPUs through torch.cuda, whose names are AMD's too where torch is built for those."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executor_svc.device import (
    Bytes,
    Device,
    DeviceLostError,
    DeviceMemory,
    DeviceUnusableError,
    Event,
    Graph,
    Pinned,
    Stream,
    is_out_of_memory,
)


class CudaEvent:
    """An event. Whoever waits for it sleeps: the thread that launches has better use for the processor."""

    def __init__(self, stream: torch.cuda.Stream, device: torch.device, *, timed: bool) -> None:
        self._device = device
        self.event = torch.cuda.Event(enable_timing=timed, blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def synchronize(self) -> None:
        """See Event."""
        try:
            # A thread that has named no device would wait in a context of the first one, which takes half a gigabyte.
            torch.cuda.set_device(self._device)
            self.event.synchronize()
        except RuntimeError as error:
            raise DeviceLostError(f"the GPU failed: {error}") from error


class CudaStream:
    """A stream beside the default one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, *, timed: bool = False) -> Event:
        """See Stream."""
        return CudaEvent(self.stream, self._device, timed=timed)

    def wait(self, event: Event) -> None:
        """See Stream."""
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)


class CudaPinned:
    """Memory from torch's allocator of page-locked memory, which gives a piece out again only behind its copies."""

    def __init__(self, size: int) -> None:
        self.tensor = torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def bytes(self) -> Bytes:
        """See Pinned."""
        array: Bytes = self.tensor.numpy()
        return array


class CudaDevice:
    """One GPU. See Device."""

    def __init__(self, torch_device: torch.device) -> None:
        """`torch_device`: one that kernels.sets.triton.find_gpu has found."""
        self.torch_device = torch.device("cuda", torch_device.index or 0)
        self.bind()
        self.name = torch.cuda.get_device_name(self.torch_device)
        self.compute: Stream = CudaStream(self.torch_device)
        self.copy: Stream = CudaStream(self.torch_device)
        self._pool = torch.cuda.graph_pool_handle()

    def bind(self) -> None:
        """See Device."""
        torch.cuda.set_device(self.torch_device)

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """See Device."""
        assert isinstance(stream, CudaStream)
        return torch.cuda.stream(stream.stream)

    def pinned(self, size: int) -> Pinned:
        """See Device."""
        return CudaPinned(size)

    def send(self, source: Pinned, target: Tensor, size: int) -> None:
        """See Device."""
        assert isinstance(source, CudaPinned)
        target[:size].copy_(source.tensor[:size], non_blocking=True)

    def put(self, array: npt.NDArray[np.generic]) -> Tensor:
        """See Device."""
        return torch.from_numpy(np.ascontiguousarray(array)).pin_memory().to(self.torch_device, non_blocking=True)

    def fetch(self, source: Tensor) -> Pinned:
        """See Device."""
        target = CudaPinned(source.nbytes)
        target.tensor.copy_(source.view(-1).view(torch.uint8), non_blocking=True)
        return target

    def seconds_between(self, begin: Event, end: Event) -> float:
        """See Device."""
        assert isinstance(begin, CudaEvent)
        assert isinstance(end, CudaEvent)
        milliseconds: float = begin.event.elapsed_time(end.event)
        return milliseconds / 1000

    def capture(self, launch: Callable[[], None]) -> Graph:
        """See Device."""
        assert isinstance(self.compute, CudaStream)
        graph = torch.cuda.CUDAGraph()
        # What another thread does with the device meanwhile, such as waiting for an event, is no part of it.
        capturing = torch.cuda.graph(
            graph, pool=self._pool, stream=self.compute.stream, capture_error_mode="thread_local"
        )
        with _no_collection(), capturing:
            launch()
        return graph

    def memory(self) -> DeviceMemory:
        """See Device."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        held = torch.cuda.memory_reserved(self.torch_device)
        peak = torch.cuda.max_memory_allocated(self.torch_device)
        return DeviceMemory(total, free, held, peak, torch.cuda.memory_allocated(self.torch_device))

    def reset_peak(self) -> None:
        """See Device."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def give_back(self) -> None:
        """See Device."""
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """See Device."""
        try:
            torch.cuda.synchronize(self.torch_device)
        except RuntimeError as error:
            raise DeviceLostError(f"the GPU failed: {error}") from error

    def is_lost(self, error: Exception) -> bool:
        """See Device."""
        if is_out_of_memory(error):
            return False
        if isinstance(error, DeviceLostError | torch.cuda.AcceleratorError):
            return True
        # Triton and cuBLAS raise plain errors, of a fault of the call as of a device that has failed: but one that has
        # fails whatever it is asked from then on.
        return isinstance(error, RuntimeError) and self._has_failed()

    def _has_failed(self) -> bool:
        try:
            self.synchronize()
        except DeviceLostError:
            return True
        return False


@contextmanager
def _no_collection() -> Iterator[None]:
    """Have Python collect no garbage, on any thread: a dead cycle may hold page-locked memory, and giving that back
    records events, which a graph under capture must not see.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def open_accelerator(torch_device: torch.device) -> Device:
    """Give the device, made the calling thread's own. Raises DeviceUnusableError."""
    try:
        return CudaDevice(torch_device)
    except RuntimeError as error:
        # The first call that reaches the card: it may be full, another's alone, or wait for a service of its own.
        said = str(error).splitlines()[0]
        raise DeviceUnusableError(
            f"--device {torch_device}: it cannot be opened: {said}; see with nvidia-smi whether its memory is full, "
            f"it is set to one process alone, or it reports a fault"
        ) from error
