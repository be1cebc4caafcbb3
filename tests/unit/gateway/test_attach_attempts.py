"""Attempts to attach: their pace, those that fail in any way, and what the log says of a peer that is not there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import grpc.aio
import pytest
from gateway_fakes import TIMEOUT

from gateway import scheduler_client
from gateway.cell import Cell
from gateway.live_requests import LiveRequests
from gateway.metrics import GatewayMetrics
from gateway.scheduler_client import Backoff, SchedulerClient
from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.rpc.channel import open_channel


def test_backoff_grows_to_a_bound() -> None:
    """Pauses double from the first to the longest, each spread over its upper half, and never overflow."""
    backoff = Backoff(initial=0.1, maximum=2.0)
    for num_failures, whole in ((1, 0.1), (2, 0.2), (4, 0.8), (6, 2.0), (100_000, 2.0)):
        delays = [backoff.delay(num_failures) for _ in range(50)]
        assert all(whole / 2 <= delay <= whole for delay in delays)
        assert len(set(delays)) > 1


class EndedCall:
    """A stream that had ended before the first write: grpc says so by InvalidStateError."""

    async def write(self, frame: scheduler_pb2.AttachRequest) -> None:
        raise asyncio.InvalidStateError("RPC already finished.")

    async def read(self) -> object:
        return await asyncio.get_running_loop().create_future()

    def __aiter__(self) -> EndedCall:
        return self

    async def __anext__(self) -> scheduler_pb2.AttachResponse:
        return await self.read()  # type: ignore[return-value]

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def cancel(self) -> bool:
        return True


@pytest.mark.asyncio
@pytest.mark.parametrize("fault", ["ended", "unforeseen"])
async def test_a_stream_that_fails_in_any_way_is_followed_by_another(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A write that races the end of the stream, and even a bug, costs one stream and never the attachment."""
    attempts: asyncio.Queue[None] = asyncio.Queue()

    class Stub:
        def __init__(self, channel: object) -> None: ...

        def Attach(self, *_: object, **__: object) -> Callable[..., EndedCall]:  # noqa: N802
            attempts.put_nowait(None)
            if fault == "unforeseen":
                raise ZeroDivisionError
            return lambda wait_for_ready: EndedCall()

    clock = asyncio.get_running_loop().time
    live = LiveRequests("ab" * 16, clock, GatewayMetrics(()))

    def dial() -> grpc.aio.Channel:
        channel = open_channel("127.0.0.1:1")
        channel.stream_stream = Stub(channel).Attach  # type: ignore[assignment, method-assign]
        return channel

    client = SchedulerClient(dial, live, Cell(), cell_name="c", clock=clock, backoff=Backoff(0.001, 0.001))
    client.start()
    for _ in range(3):
        await asyncio.wait_for(attempts.get(), TIMEOUT)
    await client.stop(1.0)
    assert ("the stream to the scheduler failed" in caplog.messages) == (fault == "unforeseen")


@pytest.mark.asyncio
async def test_a_scheduler_that_does_not_answer_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The stream waits for its peer without an end; an operator who gave a wrong address reads so in the log, once."""
    monkeypatch.setattr(scheduler_client, "PATIENCE", 0.01)
    clock = asyncio.get_running_loop().time
    live = LiveRequests("ab" * 16, clock, GatewayMetrics(()))
    client = SchedulerClient(
        lambda: open_channel("127.0.0.1:1"), live, Cell(), cell_name="c", clock=clock, backoff=Backoff(0.001, 0.001)
    )
    client.start()
    async with asyncio.timeout(TIMEOUT):
        while not caplog.records:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    await client.stop(1.0)
    assert caplog.messages == ["not attached to the scheduler"]
