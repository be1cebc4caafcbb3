"""The fake device finds each mistake that a real one would punish by chance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from device_watch import CaptureError, RuleError
from fake_device import FakeDevice
from torch import Tensor

from executor_svc.kernels import build_kernels


@pytest.fixture(name="device")
def _device() -> Iterator[FakeDevice]:
    """A device that watches this thread."""
    device = FakeDevice()
    with torch.inference_mode(), device.watching():
        yield device


def _zeros(device: FakeDevice, count: int = 4) -> Tensor:
    with device.on(device.compute):
        return torch.zeros(count, device=device.torch_device)


def test_a_result_is_read_only_behind_its_event(device: FakeDevice) -> None:
    """What was fetched cannot be seen before the host has waited, nor behind an event recorded too early."""
    with device.on(device.compute):
        early = device.compute.record()
        fetched = device.fetch(_zeros(device) + 3)
    with pytest.raises(RuleError, match="before the host has waited"):
        fetched.bytes()
    early.synchronize()
    with pytest.raises(RuleError, match="before the host has waited"):
        fetched.bytes()
    device.compute.record().synchronize()
    assert fetched.bytes().view(np.float32).tolist() == [3.0] * 4


def test_page_locked_memory_is_left_alone_while_it_is_copied(device: FakeDevice) -> None:
    """Asking for it is refused until the host has waited; a write through an older view is found at the next use."""
    pinned = device.pinned(4)
    with device.on(device.copy):
        target = torch.zeros(4, dtype=torch.uint8, device=device.torch_device)
        view = pinned.bytes()
        view[:] = 7
        device.send(pinned, target, 4)
    with pytest.raises(RuleError, match="before the host has waited"):
        pinned.bytes()
    view[0] = 9
    device.copy.record().synchronize()
    with pytest.raises(RuleError, match="was written while a copy"):
        pinned.bytes()


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_waits_for_what_another_wrote(device: FakeDevice, waits: bool) -> None:
    """What came on the copy stream may be read on the other one only behind an event."""
    pinned = device.pinned(4)
    with device.on(device.copy):
        target = torch.zeros(4, dtype=torch.uint8, device=device.torch_device)
        device.send(pinned, target, 4)
    if waits:
        device.compute.wait(device.copy.record())
    with device.on(device.compute):
        if waits:
            target.clone()
        else:
            with pytest.raises(RuleError, match="compute has not waited for what copy does"):
                target.clone()


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_waits_for_what_another_still_reads(device: FakeDevice, waits: bool) -> None:
    """Memory that a step reads is not written over by the copy for a later one."""
    pinned = device.pinned(4)
    with device.on(device.copy):
        target = torch.zeros(4, dtype=torch.uint8, device=device.torch_device)
    device.compute.wait(device.copy.record())
    with device.on(device.compute):
        target.clone()
    if waits:
        device.copy.wait(device.compute.record())
    with device.on(device.copy):
        if waits:
            device.send(pinned, target, 4)
        else:
            with pytest.raises(RuleError, match="copy has not waited for what compute does"):
                device.send(pinned, target, 4)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x[0].item(),
        lambda x: bool(x[0] > 0),
        lambda x: int(x[0]),
        lambda x: x.nonzero(),
        lambda x: x.cpu(),
    ],
)
def test_the_host_reads_nothing_by_itself(device: FakeDevice, mistake: Callable[[Tensor], object]) -> None:
    """Each of torch's ways to look at a tensor waits for the device, and is refused."""
    x = _zeros(device)
    with device.on(device.compute), pytest.raises(RuleError, match="without fetching it"):
        mistake(x)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda x: x + torch.zeros(4),
        lambda x: x[torch.from_numpy(np.arange(2))],
        lambda x: x.copy_(torch.ones(4)),
        lambda x: x.index_select(0, torch.tensor([1])),
    ],
)
def test_tensors_of_the_host_are_told_from_the_devices(device: FakeDevice, mistake: Callable[[Tensor], object]) -> None:
    """A tensor that was made without a device, or from an array, is the host's, and does not mix."""
    x = _zeros(device)
    with device.on(device.compute), pytest.raises(RuleError, match="a tensor of the host"):
        mistake(x)


def test_kernels_take_tensors_of_the_device_alone(device: FakeDevice) -> None:
    """So do the ops of a kernel set, whatever they do inside."""
    kernels = device.watch.kernels(build_kernels("reference"))
    x = _zeros(device, 8).view(2, 4)
    with device.on(device.compute):
        weight = torch.ones(4, device=device.torch_device)
        assert kernels.rms_norm(x, weight, 1e-5).shape == (2, 4)
        with pytest.raises(RuleError, match="a tensor of the host"):
            kernels.rms_norm(x, torch.ones(4), 1e-5)


def test_nothing_is_launched_on_the_default_stream(device: FakeDevice) -> None:
    """Work outside `on` would be ordered behind nothing."""
    x = _zeros(device)
    with pytest.raises(RuleError, match="on the default stream"):
        x.add_(1)


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        (lambda device, x: device.put(np.zeros(2)), "copying from the host"),
        (lambda device, x: device.fetch(x), "copying to the host"),
        (lambda device, x: device.pinned(4), "taking page-locked memory"),
        (lambda device, x: device.synchronize(), "waiting for the device"),
        (lambda device, x: device.compute.record(), "recording an event"),
        (lambda device, x: torch.where(x > 0, x, 1.0), "where: a number of the host"),
    ],
)
def test_what_a_graph_cannot_hold_is_not_captured(
    device: FakeDevice, mistake: Callable[[FakeDevice, Tensor], object], told: str
) -> None:
    """Copies from and to the host, waits, and page-locked memory."""
    x = _zeros(device)
    with pytest.raises(CaptureError, match=told):
        device.capture(lambda: mistake(device, x))  # type: ignore[arg-type, return-value]
    device.synchronize()


def test_what_was_not_warmed_up_is_not_captured(device: FakeDevice) -> None:
    """A kernel that meets new shapes in a capture would be compiled there."""
    kernels = device.watch.kernels(build_kernels("reference"))
    x = _zeros(device, 8).view(2, 4)

    def launch() -> None:
        kernels.finite_rows(x)

    with pytest.raises(CaptureError, match="finite_rows is captured with shapes"):
        device.capture(launch)
    with device.on(device.compute):
        launch()
    device.capture(launch)


def test_a_replay_reads_and_writes_where_it_was_captured(device: FakeDevice) -> None:
    """New content at the same place is computed with; numbers of the host stay those of the capture."""
    x, kept, factor = _zeros(device), [], 2

    def launch() -> None:
        kept.append(torch.cat((x * factor, x)))

    graph = device.capture(launch)
    factor = 5
    with device.on(device.compute):
        x.fill_(7)
        graph.replay()
        fetched = device.fetch(kept[0])
    device.synchronize()
    assert fetched.bytes().view(np.float32).tolist() == [14.0] * 4 + [7.0] * 4


def test_a_graph_whose_memory_moved_is_not_replayed(device: FakeDevice) -> None:
    """What it was captured with must still be somebody's."""
    tensors = [_zeros(device)]

    def launch() -> None:
        tensors[0].add_(1)

    graph = device.capture(launch)
    with device.on(device.compute):
        graph.replay()
        tensors[0] = tensors[0].clone()
        with pytest.raises(RuleError, match="has been given back"):
            graph.replay()


def test_time_is_told_of_events_that_are_over(device: FakeDevice) -> None:
    """Only timed events, and only behind a wait."""
    begin = device.compute.record(timed=True)
    _zeros(device)
    end, other = device.compute.record(timed=True), device.compute.record()
    with pytest.raises(RuleError, match="has no time"):
        device.seconds_between(begin, end)
    end.synchronize()
    assert device.seconds_between(begin, end) == 0.001
    with pytest.raises(RuleError, match="has no time"):
        device.seconds_between(begin, other)


def test_what_an_op_changes_in_place_is_done_again_by_a_graph(device: FakeDevice) -> None:
    """A sum into one of its arguments gives no new tensor, and is a launch all the same."""
    kernels = device.watch.kernels(build_kernels("reference"))
    with device.on(device.compute):
        one, total = _zeros(device) + 1, _zeros(device)

        def launch() -> None:
            kernels.add_to(one, total)

        launch()
        graph = device.capture(launch)
        for _ in range(3):
            graph.replay()
        fetched = device.fetch(total)
        device.compute.record().synchronize()
    # What is captured is computed at once here, as the fake has no other way to know what it gives.
    assert fetched.bytes().view(np.float32).tolist() == [5.0] * 4


def test_an_op_that_seems_to_do_nothing_is_found(device: FakeDevice) -> None:
    """One that changes an argument has to say so, or a graph would leave it out."""
    silent = replace(build_kernels("reference"), silu=lambda x: x.mul_(2.0))
    with device.on(device.compute), pytest.raises(AssertionError, match="silu: see CHANGED"):
        device.watch.kernels(silent).silu(_zeros(device))
