"""What is asked of torch.cuda: calls that it has, with arguments that it takes, in the order that the rules want.

No GPU is needed: stand-ins are called in place of torch's, each held to the signature of what it stands for.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from executor_svc.device import DeviceLostError, DeviceUnusableError
from executor_svc.device.cuda import CudaDevice, CudaEvent, open_accelerator
from octavo.rpc.settings import SettingsError

CPU = torch.device("cpu")


class Calls(list[tuple[Any, ...]]):
    """What was called, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.failing: Exception | None = None

    def stand_in(self, name: str, real: Callable[..., Any], result: Any = None) -> Callable[..., Any]:
        """Give a function in place of `real` that takes what that takes."""

        def call(*arguments: Any, **named: Any) -> Any:
            inspect.signature(real).bind(*arguments, **named)
            self.append((name, *arguments))
            if self.failing is not None:
                raise self.failing
            return result

        return call


@pytest.fixture(name="calls")
def _calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Stand-ins for all of torch.cuda that is used."""
    calls = Calls()
    real = {name: getattr(torch.cuda, name) for name in ("Stream", "Event", "CUDAGraph", "graph", "stream")}

    class Stream:
        def __init__(self, *arguments: Any, **named: Any) -> None:
            inspect.signature(real["Stream"].__new__).bind(real["Stream"], *arguments, **named)
            calls.append(("Stream", *arguments))

        def wait_event(self, event: Any) -> None:
            calls.append(("wait_event", self, event))

    class Event:
        def __init__(self, *arguments: Any, **named: Any) -> None:
            inspect.signature(real["Event"].__new__).bind(real["Event"], *arguments, **named)
            calls.append(("Event", named))

        def record(self, stream: Any) -> None:
            calls.append(("record", stream))

        def synchronize(self) -> None:
            if calls.failing is not None:
                raise calls.failing
            calls.append(("event.synchronize",))

        def elapsed_time(self, end: Any) -> float:
            return 1500.0

    class Graph:
        def __init__(self, *arguments: Any, **named: Any) -> None:
            inspect.signature(real["CUDAGraph"].__new__).bind(real["CUDAGraph"], *arguments, **named)

        def replay(self) -> None:
            calls.append(("replay",))

    @contextlib.contextmanager
    def graph(*arguments: Any, **named: Any) -> Iterator[None]:
        inspect.signature(real["graph"].__init__).bind(None, *arguments, **named)
        calls.append(("capture", named))
        yield
        calls.append(("captured",))

    @contextlib.contextmanager
    def stream(*arguments: Any) -> Iterator[None]:
        inspect.signature(real["stream"]).bind(*arguments)
        calls.append(("on", *arguments))
        yield

    made = {"Stream": Stream, "Event": Event, "CUDAGraph": Graph, "graph": graph, "stream": stream}
    results = {
        "set_device": None,
        "get_device_name": "a card",
        "graph_pool_handle": (0, 1),
        "mem_get_info": (600, 1000),
        "memory_reserved": 300,
        "max_memory_allocated": 250,
        "memory_allocated": 200,
        "reset_peak_memory_stats": None,
        "empty_cache": None,
        "synchronize": None,
    }
    made |= {name: calls.stand_in(name, getattr(torch.cuda, name), result) for name, result in results.items()}
    for name, each in made.items():
        monkeypatch.setattr(torch.cuda, name, each)
    empty = torch.empty

    def pinned_empty(*arguments: Any, pin_memory: bool = False, **named: Any) -> Tensor:
        if pin_memory:
            calls.append(("pinned", *arguments))
        return empty(*arguments, **named)

    def pin_memory(tensor: Tensor) -> Tensor:
        calls.append(("pin_memory",))
        return tensor.clone()

    monkeypatch.setattr(torch, "empty", pinned_empty)
    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    return calls


@pytest.fixture(name="device")
def _device(calls: Calls) -> CudaDevice:
    """A device whose tensors are the CPU's."""
    device = open_accelerator(torch.device("cuda"))
    assert isinstance(device, CudaDevice)
    assert device.torch_device == torch.device("cuda", 0)
    assert ("set_device", device.torch_device) in calls
    device.torch_device = CPU
    del calls[:]
    return device


def test_streams_wait_for_events(calls: Calls, device: CudaDevice) -> None:
    """An event is recorded where it was asked for, sleeps its waiter, is timed on request, and another stream waits.

    The waiter is first made one of the device's threads: any other would open a context on the first card.
    """
    event = device.copy.record(timed=True)
    device.compute.wait(event)
    event.synchronize()
    names = [call[0] for call in calls]
    assert names == ["Event", "record", "wait_event", "set_device", "event.synchronize"]
    assert calls[3][1] == torch.device("cuda", 0)
    assert calls[0][1] == {"enable_timing": True, "blocking": True}
    assert calls[1][1] is device.copy.stream  # type: ignore[attr-defined]
    assert calls[2][1] is device.compute.stream  # type: ignore[attr-defined]
    assert device.seconds_between(event, device.copy.record(timed=True)) == 1.5


def test_a_failed_wait_is_a_lost_device(calls: Calls, device: CudaDevice) -> None:
    """What CUDA says then is kept; a lack of memory is none of it."""
    event = device.compute.record()
    assert isinstance(event, CudaEvent)
    calls.failing = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(DeviceLostError, match="the GPU failed: CUDA error: an illegal"):
        event.synchronize()
    with pytest.raises(DeviceLostError):
        device.synchronize()
    assert device.is_lost(DeviceLostError("the GPU failed"))
    assert device.is_lost(torch.cuda.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    assert not device.is_lost(torch.OutOfMemoryError("CUDA out of memory"))
    assert not device.is_lost(torch.cuda.AcceleratorError("CUDA error: out of memory"))
    assert not device.is_lost(ValueError("a fault"))


@pytest.mark.parametrize(
    "message",
    [
        "Triton Error [CUDA]: an illegal memory access was encountered",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`",
    ],
)
def test_the_device_itself_is_asked_what_a_plain_error_means(calls: Calls, device: CudaDevice, message: str) -> None:
    """Triton's errors and cuBLAS's have no type of their own: the device is lost if it does not answer any more."""
    assert not device.is_lost(RuntimeError(message))
    calls.failing = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert device.is_lost(RuntimeError(message))
    for lack in ("Triton Error [CUDA]: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"):
        assert not device.is_lost(RuntimeError(lack))


def test_a_card_that_cannot_be_opened_is_told(calls: Calls) -> None:
    """The first call that reaches it says why, without the stack of the driver, and what to look at is named."""
    calls.failing = RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nCompile with ...")
    # Which the executor's process ends with, in a line.
    assert issubclass(DeviceUnusableError, SettingsError)
    with pytest.raises(DeviceUnusableError) as caught:
        open_accelerator(torch.device("cuda"))
    told = str(caught.value)
    assert told.startswith("--device cuda: it cannot be opened: CUDA error: all CUDA-capable devices are busy or ")
    assert "unavailable; see with nvidia-smi whether" in told


def test_copies_go_through_page_locked_memory(calls: Calls, device: CudaDevice) -> None:
    """There and back, on the current stream, without a wait in between."""
    pinned = device.pinned(8)
    pinned.bytes()[:] = np.arange(8)
    target = torch.zeros(16, dtype=torch.uint8)
    device.send(pinned, target, 8)
    assert target.tolist() == [*range(8), *[0] * 8]
    array = np.arange(6, dtype=np.int64)[::2]
    tensor = device.put(array)
    array[:] = 0
    assert tensor.tolist() == [0, 2, 4]
    fetched = device.fetch(tensor)
    assert fetched.bytes().view(np.int64).tolist() == [0, 2, 4]
    assert device.fetch(torch.zeros((3, 0), dtype=torch.int64)).bytes().size == 0
    assert device.fetch(torch.tensor([True, False])).bytes().tolist() == [1, 0]
    assert [call for call in calls if call[0] in ("pinned", "pin_memory")][:3] == [
        ("pinned", 8),
        ("pin_memory",),
        ("pinned", 24),
    ]
    assert not [call for call in calls if "synchronize" in call[0]]


def test_graphs_are_captured_on_the_compute_stream_into_one_pool(calls: Calls, device: CudaDevice) -> None:
    """The launches are made inside the capture, and a replay makes no call but that."""
    graph = device.capture(lambda: calls.append(("launched",)))
    assert [call[0] for call in calls] == ["capture", "launched", "captured"]
    named = calls[0][1]
    assert named["stream"] is device.compute.stream  # type: ignore[attr-defined]
    assert named["pool"] == (0, 1)
    assert named["capture_error_mode"] == "thread_local"
    graph.replay()
    assert calls[-1] == ("replay",)


def test_no_garbage_is_collected_in_a_capture(device: CudaDevice) -> None:
    """Memory that is given back in the middle of it would record events there; afterwards it is as it was before."""
    seen: list[bool] = []
    assert gc.isenabled()
    device.capture(lambda: seen.append(gc.isenabled()))
    assert (seen, gc.isenabled()) == ([False], True)
    gc.disable()
    try:
        device.capture(lambda: seen.append(gc.isenabled()))
        assert (seen[1], gc.isenabled()) == (False, False)
        with pytest.raises(RuntimeError, match="a fault"):
            device.capture(_fail)
    finally:
        gc.enable()
    with pytest.raises(RuntimeError, match="a fault"):
        device.capture(_fail)
    assert gc.isenabled()


def _fail() -> None:
    raise RuntimeError("a fault")


def test_memory_is_accounted_for(calls: Calls, device: CudaDevice) -> None:
    """What is free is nobody's, what the allocator holds is this process's, and the rest is others'."""
    memory = device.memory()
    assert (memory.total, memory.free, memory.held, memory.peak, memory.in_use) == (1000, 600, 300, 250, 200)
    assert memory.others == 100
    device.reset_peak()
    device.give_back()
    device.synchronize()
    assert [call[0] for call in calls[-3:]] == ["reset_peak_memory_stats", "empty_cache", "synchronize"]


def test_a_stream_is_made_current(calls: Calls, device: CudaDevice) -> None:
    """Inside `on`, by torch's own context."""
    with device.on(device.copy):
        assert calls[-1] == ("on", device.copy.stream)  # type: ignore[attr-defined]
