"""A scheduler that falls silent, does not hear, loses frames or is stalled, and one that has the gateway stop."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from gateway_fakes import TIMEOUT, FakeScheduler, Stack, running_stack, text_of, tokens_of
from tokenizer_samples import EOS_ID, byte_level

from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.models.prepared import PreparedModel
from octavo.rpc.errors import from_rpc_error
from octavo.v1 import admin_pb2, inference_pb2

TEXT = "the cat sat on the mat"
TOKENS = [*byte_level().tokenizer.encode(TEXT).ids, EOS_ID]


async def start_stream(stack: Stack) -> tuple[asyncio.Task[list[inference_pb2.GenerateResponse]], int]:
    """Start a stream that the scheduler has; returns what it will have read, and its counter."""
    read = asyncio.create_task(stack.generate(inference_pb2.GenerateRequest(text=TEXT)))
    (submit,) = await stack.scheduler.wait_received("submit")
    return read, submit.request


def report(scheduler: FakeScheduler, num_received_frames: int = 0, *, is_stalled: bool = False) -> None:
    """Send a load report."""
    scheduler.send(load_report=scheduler_pb2.LoadReport(num_received_frames=num_received_frames, is_stalled=is_stalled))


@pytest.mark.asyncio
@pytest.mark.parametrize("fault", ["silent", "deaf"])
async def test_a_cut_in_one_direction_is_found(prepared: PreparedModel, fault: str) -> None:
    """Nothing comes, or frames of ours do not arrive though the scheduler talks on: the gateway attaches anew."""
    scheduler = FakeScheduler(auto=False)
    async with running_stack(prepared, scheduler, stall_timeout=0.4) as stack:
        read, _ = await start_stream(stack)
        report(scheduler, 1)
        async with asyncio.timeout(TIMEOUT):
            while len(scheduler.of_kind("hello")) < 2:
                if fault == "deaf" and scheduler.is_attached:
                    report(scheduler, 1)
                await asyncio.sleep(0.02)
        scheduler.step(len(TOKENS))
        events = await read
        assert tokens_of(events) == TOKENS
        assert text_of(events) == TEXT


@pytest.mark.asyncio
async def test_a_missing_frame_is_asked_for_again(prepared: PreparedModel) -> None:
    """A frame behind one that has not come is not applied: the gateway attaches again, and is sent what it lacks."""
    scheduler = FakeScheduler(auto=False)
    async with running_stack(prepared, scheduler) as stack:
        read, counter = await start_stream(stack)
        for sequence, index in ((1, 0), (3, 2)):
            step = scheduler_pb2.StepOutputs(
                sequence=sequence, requests=[counter], choices=[0], token_indexes=[index], token_ids=[TOKENS[index]]
            )
            scheduler.send(step_outputs=step)
        await scheduler.wait_received("hello", 2)
        scheduler.step(len(TOKENS))
        assert tokens_of(await read) == TOKENS


@pytest.mark.asyncio
async def test_a_stalled_cell_is_not_serving(prepared: PreparedModel) -> None:
    """Health follows the scheduler's word, and so does /health; requests are taken in all the same."""
    scheduler = FakeScheduler(auto=False)
    async with running_stack(prepared, scheduler) as stack:
        report(scheduler, is_stalled=True)
        await stack.wait_health(False)
        read, _ = await start_stream(stack)
        report(scheduler)
        await stack.wait_health(True)
        scheduler.step(len(TOKENS))
        assert tokens_of(await read) == TOKENS


def dumps_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    """Return the states that were dumped."""
    found = [record for record in caplog.records if record.message == "requests wait and nothing comes"]
    return [record.fields for record in found]  # type: ignore[attr-defined]


@pytest.mark.asyncio
async def test_one_dump_for_each_stall(prepared: PreparedModel, caplog: pytest.LogCaptureFixture) -> None:
    """By the scheduler's word: what waits here is told once a stall, however often that is said, and its end once; a
    stalled cell of which this gateway wants nothing is no news.
    """
    scheduler = FakeScheduler(auto=False)
    async with running_stack(prepared, scheduler) as stack:
        report(scheduler, is_stalled=True)
        await stack.wait_health(False)
        assert not dumps_of(caplog)
        report(scheduler)
        await stack.wait_health(True)
        read, counter = await start_stream(stack)
        for _ in range(2):
            for is_stalled in (True, True, False):
                report(scheduler, is_stalled=is_stalled)
                await stack.wait_health(not is_stalled)
        first, second = dumps_of(caplog)
        assert (first["is_attached"], first["waiting"], second["waiting"]) == (True, 1, 1)
        assert f"-{counter}'" in str(first["oldest_requests"])
        assert len([record for record in caplog.records if record.message == "requests go on"]) == 2
        scheduler.step(len(TOKENS))
        assert tokens_of(await read) == TOKENS


@pytest.mark.asyncio
async def test_a_scheduler_that_is_away_is_a_stall_of_what_waits(
    prepared: PreparedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests wait and nothing comes for the bound: one dump that says why; with the scheduler back they go on."""
    scheduler = FakeScheduler(auto=False)
    async with running_stack(prepared, scheduler, stall_timeout=0.4) as stack:
        read, _ = await start_stream(stack)
        await scheduler.stop()
        async with asyncio.timeout(TIMEOUT):
            while not dumps_of(caplog):
                await asyncio.sleep(0.02)
        [dump] = dumps_of(caplog)
        assert (dump["is_attached"], dump["waiting"]) == (False, 1)
        await scheduler.start()
        await stack.wait_health(True)
        scheduler.step(len(TOKENS))
        assert tokens_of(await read) == TOKENS


@pytest.mark.asyncio
@pytest.mark.parametrize("by", ["scheduler", "itself"])
async def test_a_gateway_is_asked_to_stop(prepared: PreparedModel, by: str) -> None:
    """By the scheduler, for another's operator, or by its own: it finishes what it has and refuses what comes."""
    scheduler = FakeScheduler(auto=False)
    async with running_stack(prepared, scheduler, drain_grace=TIMEOUT) as stack:
        read, _ = await start_stream(stack)
        if by == "scheduler":
            scheduler.send(drain_gateway=scheduler_pb2.DrainGateway())
        else:
            await stack.admin.Drain(admin_pb2.DrainRequest(gateway="self"), timeout=TIMEOUT)
        async with asyncio.timeout(TIMEOUT):
            await stack.gateway.drained.wait()
        stopping = asyncio.create_task(stack.gateway.stop())
        await stack.wait_health(False)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stack.generate(inference_pb2.GenerateRequest(text=TEXT))
        error = from_rpc_error(raised.value)
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
        assert error.retry_delay
        scheduler.step(len(TOKENS))
        assert tokens_of(await read) == TOKENS
        await stopping
