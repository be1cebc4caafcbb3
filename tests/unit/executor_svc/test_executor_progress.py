"""Signs of life of an executor, sessions that take another's place, and its stop by word of the scheduler."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from executor_stack import TIMEOUT, Peer, Stack, first_step, next_step, running_executor

from octavo.internal.executor.v1 import executor_pb2 as pb


@pytest_asyncio.fixture
async def stack(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Stack]:
    """A served executor."""
    async with running_executor(caplog) as running:
        yield running


async def next_ticks(peer: Peer) -> int:
    """The next sign of life; other frames are passed over."""
    while True:
        frame = await asyncio.wait_for(peer.call.read(), TIMEOUT)
        if frame.WhichOneof("frame") == "progress":
            ticks: int = frame.progress.num_ticks
            return ticks


@pytest.mark.asyncio
async def test_ticks_grow_with_the_devices_work_and_with_nothing_else(stack: Stack) -> None:
    """From Ready on there are signs of life; a step that hangs on the device leaves their count where it is."""
    running, gate = threading.Event(), threading.Event()

    def block(number: int) -> None:
        running.set()
        assert gate.wait(TIMEOUT)

    peer = stack.peer()
    await peer.begin(1, 1)
    idle = await next_ticks(peer)
    await peer.write(step_batch=first_step(session=1))
    while await next_ticks(peer) <= idle:
        pass
    stack.before_forward = block
    await peer.write(step_batch=next_step(2, 3, session=1))
    assert await asyncio.to_thread(running.wait, TIMEOUT)
    stuck = await next_ticks(peer)
    assert stack.worker.is_busy
    assert "block" in stack.worker.where()
    assert [await next_ticks(peer) for _ in range(3)] == [stuck] * 3
    stack.before_forward = lambda number: None
    gate.set()
    while await next_ticks(peer) <= stuck:
        pass


@pytest.mark.asyncio
async def test_a_later_session_of_the_same_term_takes_over(stack: Stack) -> None:
    """A scheduler that was cut off comes back before the cut is noticed here: the old stream ends with ABORTED."""
    old = stack.peer()
    await old.begin(5, 1)
    new = stack.peer()
    await new.begin(5, 2)
    error = await old.end()
    assert (error.code, error.reason) == (grpc.StatusCode.ABORTED, "SESSION_REPLACED")
    assert (await new.step(first_step(session=2))).statuses == [pb.ROW_STATUS_OK]


@pytest.mark.asyncio
async def test_drain_is_passed_on(stack: Stack) -> None:
    """The frame ends nothing by itself: whoever runs the executor is told, and steps go on until then."""
    peer = stack.peer()
    await peer.begin(1, 1)
    await peer.write(drain=pb.Drain())
    assert (await peer.step(first_step(session=1))).statuses == [pb.ROW_STATUS_OK]
    assert stack.servicer.drained.is_set()
