"""ExecutorService over a real channel: opening, sessions, frames, ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from executor_stack import TIMEOUT, Stack, first_step, new_sequence, next_step, running_executor
from fakes_executor import make_limits

from octavo.internal.executor.v1 import executor_pb2 as pb
from octavo.rpc.errors import ServiceError


@pytest_asyncio.fixture(name="stack")
async def _stack(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Stack]:
    """A served executor, and a check at its end that nothing of it is left."""
    async with running_executor(caplog) as stack:
        yield stack


@pytest.mark.asyncio
async def test_a_session_from_welcome_to_close(stack: Stack) -> None:
    """Welcome carries who and how much; steps, several in flight, are answered in order; closing the stream ends it
    with OK.
    """
    peer = stack.peer()
    welcome = (await peer.read()).welcome
    limits = make_limits()
    assert (welcome.incarnation, welcome.cell, welcome.model_name) == ("ab" * 16, "cell-a", "tiny")
    assert (welcome.model_revision, welcome.tokenizer_hash, welcome.fingerprint) == ("rev", "tok", "finger")
    assert (welcome.block_size, welcome.num_blocks, welcome.vocab_size) == (4, limits.num_blocks, 61)
    assert (welcome.max_num_seqs, welcome.max_num_batched_tokens, welcome.max_model_len) == (8, 64, 48)
    assert welcome.highest_term == 0
    await peer.write(begin=pb.Begin(term=5, session=7))
    assert (await peer.read()).ready.session == 7
    for batch in (first_step(), next_step(2, 3), next_step(3, 4)):
        await peer.write(step_batch=batch)
    results = [(await peer.read()).step_result for _ in range(3)]
    assert [(result.session, result.step) for result in results] == [(7, 1), (7, 2), (7, 3)]
    for result in results:
        assert (list(result.handles), list(result.statuses)) == ([1], [pb.ROW_STATUS_OK])
        assert (list(result.num_sampled_tokens), len(result.token_ids)) == ([1], 1)
        assert result.timings.forward.ToNanoseconds() > 0
    await peer.call.done_writing()
    assert await asyncio.wait_for(peer.call.read(), TIMEOUT) is grpc.aio.EOF
    assert await peer.call.code() == grpc.StatusCode.OK


@pytest.mark.asyncio
async def test_logprobs_cross_the_wire(stack: Stack) -> None:
    """A row that asks gets its columns packed, under its row index; a row that does not gets none."""
    peer = stack.peer()
    await peer.begin(1, 7)
    batch = first_step(
        new_sequences=[new_sequence(1, [9, 8, 7]), new_sequence(2, [9, 8, 7], top_logprobs=3)],
        handles=[1, 2],
        num_scheduled_tokens=[3, 3],
        num_computed_tokens=[0, 0],
        num_new_blocks=[1, 1],
        new_blocks=[1, 2],
    )
    result = await peer.step(batch)
    (entry,) = result.logprobs
    assert (entry.row, entry.columns.num_top) == (1, 3)
    assert (len(entry.columns.sampled), len(entry.columns.top_token_ids), len(entry.columns.top_logprobs)) == (
        4,
        12,
        12,
    )
    # Greedy: the sampled token is the likeliest.
    assert entry.columns.top_token_ids[:4] == result.token_ids[1].to_bytes(4, "little")
    assert entry.columns.top_logprobs[:4] == entry.columns.sampled


@pytest.mark.asyncio
async def test_terms(stack: Stack) -> None:
    """A lower term is refused for ever after, the highest term is told in Welcome, an equal one waits for the live
    stream.
    """
    first = stack.peer()
    await first.begin(5, 1)
    stale = stack.peer()
    assert (await stale.read()).welcome.highest_term == 5
    await stale.write(begin=pb.Begin(term=4, session=1))
    error = await stale.end()
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STALE_TERM")
    assert error.metadata == {"highest_term": "5"}
    second = stack.peer()
    await second.read()
    await second.write(begin=pb.Begin(term=5, session=1))
    error = await second.end()
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "SESSION_EXISTS")
    assert (await first.step(first_step(session=1))).statuses == [pb.ROW_STATUS_OK]
    await first.call.done_writing()
    assert await asyncio.wait_for(first.call.read(), TIMEOUT) is grpc.aio.EOF
    third = stack.peer()
    await third.begin(5, 3)


@pytest.mark.asyncio
async def test_a_higher_term_takes_over(stack: Stack) -> None:
    """A higher term ends the live stream with ABORTED; the new session waits for the running step, hears nothing of
    it and starts empty.
    """
    running, gate = threading.Event(), threading.Event()

    def block(number: int) -> None:
        running.set()
        assert gate.wait(TIMEOUT)

    old = stack.peer()
    await old.begin(5, 1)
    stack.before_forward = block
    await old.write(step_batch=first_step(session=1))
    await old.write(step_batch=next_step(2, 3, session=1))
    assert await asyncio.to_thread(running.wait, TIMEOUT)
    new = stack.peer()
    await new.read()
    await new.write(begin=pb.Begin(term=6, session=1))
    error = await old.end()
    assert (error.code, error.reason) == (grpc.StatusCode.ABORTED, "SESSION_REPLACED")
    ready = asyncio.create_task(new.read())
    await new.write(
        step_batch=first_step(session=1, new_sequences=[], num_computed_tokens=[3], num_scheduled_tokens=[1])
    )
    assert not ready.done()
    stack.before_forward = lambda number: None
    gate.set()
    assert (await ready).ready.session == 1
    result = (await new.read()).step_result
    assert (result.step, list(result.statuses)) == (1, [pb.ROW_STATUS_DESYNC])


@pytest.mark.asyncio
async def test_a_cut_connection_frees_the_executor(stack: Stack) -> None:
    """A stream that is cut while a step runs, with others queued, lets the next one of the same term in, empty."""
    first = stack.peer()
    await first.begin(5, 1)
    running, gate = threading.Event(), threading.Event()

    def block(number: int) -> None:
        running.set()
        assert gate.wait(TIMEOUT)

    stack.before_forward = block
    await first.write(step_batch=first_step(session=1))
    await first.write(step_batch=next_step(2, 3, session=1))
    assert await asyncio.to_thread(running.wait, TIMEOUT)
    num_forwards = stack.model.num_forwards
    stack.worker.opened.clear()
    first.call.cancel()
    stack.before_forward = lambda number: None
    # The executor hears of the cut a moment later and refuses until then; once it has heard, the begun step is still
    # running.
    opened = asyncio.create_task(stack.worker.opened.wait())
    while not opened.done():
        peer = stack.peer()
        await peer.read()
        await peer.write(begin=pb.Begin(term=5, session=2))
        ready = asyncio.create_task(peer.call.read())
        await asyncio.wait({opened, ready}, return_when=asyncio.FIRST_COMPLETED, timeout=TIMEOUT)
        if not opened.done():
            assert isinstance(ready.exception(), grpc.aio.AioRpcError)
    assert not ready.done()
    gate.set()
    assert (await asyncio.wait_for(ready, TIMEOUT)).ready.session == 2
    assert (await peer.step(first_step(session=2))).statuses == [pb.ROW_STATUS_OK]
    # The queued step of the cut session never ran, and its sequence is gone.
    assert stack.model.num_forwards == num_forwards + 1
    after = pb.StepBatch(
        session=2, step=2, handles=[2], num_scheduled_tokens=[1], num_computed_tokens=[3], num_new_blocks=[0]
    )
    assert (await peer.step(after)).statuses == [pb.ROW_STATUS_DESYNC]


@pytest.mark.asyncio
async def test_frames_of_another_session_are_dropped(stack: Stack) -> None:
    """A StepBatch of another session changes nothing and is not counted."""
    peer = stack.peer()
    await peer.begin(5, 7)
    await peer.write(step_batch=first_step(session=6))
    assert (await peer.step(first_step())).statuses == [pb.ROW_STATUS_OK]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("frame", "field"),
    [
        ({"step_batch": first_step(step=2)}, "step_batch.step"),
        ({"step_batch": first_step(step=0)}, "step_batch.step"),
        ({"step_batch": first_step(num_scheduled_tokens=[])}, "step_batch.handles"),
        ({"step_batch": first_step(num_computed_tokens=[0, 0])}, "step_batch.handles"),
        ({"step_batch": first_step(num_new_blocks=[])}, "step_batch.handles"),
        ({"step_batch": first_step(new_blocks=[1, 2])}, "step_batch.new_blocks"),
        ({"step_batch": first_step(num_new_blocks=[2**32 - 1])}, "step_batch.new_blocks"),
        ({"step_batch": first_step(handles=[0], new_sequences=[])}, "step_batch.handles"),
        ({"step_batch": first_step(handles=[2])}, "step_batch.new_sequences"),
        (
            {"step_batch": first_step(new_sequences=[new_sequence(1, [1]), new_sequence(1, [1])])},
            "step_batch.new_sequences",
        ),
        (
            {
                "step_batch": first_step(
                    handles=[1, 1],
                    num_scheduled_tokens=[3, 3],
                    num_computed_tokens=[0, 0],
                    num_new_blocks=[1, 1],
                    new_blocks=[1, 2],
                )
            },
            "step_batch.handles",
        ),
        ({"begin": pb.Begin(term=5, session=8)}, "frame"),
        ({}, "frame"),
    ],
)
async def test_malformed_frames(stack: Stack, frame: dict[str, Any], field: str) -> None:
    """A frame without meaning ends the stream with INVALID_ARGUMENT naming the field; the next stream is served."""
    peer = stack.peer()
    await peer.begin(5, 7)
    await peer.write(**frame)
    error = await peer.end()
    assert error.code == grpc.StatusCode.INVALID_ARGUMENT
    assert [violation.field for violation in error.violations] == [field]
    again = stack.peer()
    await again.begin(5, 8)
    assert stack.worker.alive


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "frame",
    [
        {"step_batch": first_step()},
        {},
        {"begin": pb.Begin(term=0, session=1)},
        {"begin": pb.Begin(term=1, session=0)},
        {"begin": pb.Begin(term=2**63, session=1)},
    ],
)
async def test_malformed_openings(stack: Stack, frame: dict[str, Any]) -> None:
    """Anything but a Begin with a term and a session is refused with INVALID_ARGUMENT, and teaches no term."""
    peer = stack.peer()
    await peer.read()
    await peer.write(**frame)
    assert (await peer.end()).code == grpc.StatusCode.INVALID_ARGUMENT
    assert (await stack.peer().read()).welcome.highest_term == 0


@pytest.mark.asyncio
async def test_closing_before_begin(stack: Stack) -> None:
    """A peer that hears Welcome and leaves gets OK: that is how a scheduler of another cell says no."""
    peer = stack.peer()
    await peer.read()
    await peer.call.done_writing()
    assert await asyncio.wait_for(peer.call.read(), TIMEOUT) is grpc.aio.EOF
    assert await peer.call.code() == grpc.StatusCode.OK


@pytest.mark.asyncio
async def test_failed_and_refused_steps_over_the_wire(stack: Stack) -> None:
    """A failed step is answered with its failure and empty columns, the one in flight behind it is REFUSED, the next
    one runs.
    """
    peer = stack.peer()
    await peer.begin(5, 7)
    running, gate = threading.Event(), threading.Event()

    def fail(number: int) -> None:
        running.set()
        assert gate.wait(TIMEOUT)
        raise MemoryError

    stack.before_forward = fail
    await peer.write(step_batch=first_step())
    assert await asyncio.to_thread(running.wait, TIMEOUT)
    await peer.write(step_batch=next_step(2, 3))
    while await asyncio.wait_for(stack.worker.submitted.get(), TIMEOUT) != 2:
        pass
    gate.set()
    failed, refused = (await peer.read()).step_result, (await peer.read()).step_result
    assert failed.failure.reason == pb.STEP_FAILURE_REASON_OUT_OF_MEMORY
    assert (list(failed.handles), list(failed.statuses), list(failed.token_ids)) == ([], [], [])
    assert refused.failure.reason == pb.STEP_FAILURE_REASON_REFUSED
    stack.before_forward = lambda number: None
    again = first_step(step=3, new_sequences=[new_sequence(2, [9, 8, 7])], handles=[2], released_handles=[1])
    assert (await peer.step(again)).statuses == [pb.ROW_STATUS_OK]


@pytest.mark.asyncio
async def test_end_streams(stack: Stack) -> None:
    """Ending the streams ends those in session and those before it with the given error, and refuses later ones with
    it.
    """
    in_session, waiting = stack.peer(), stack.peer()
    await in_session.begin(5, 1)
    await waiting.read()
    stack.servicer.end_streams(ServiceError(grpc.StatusCode.UNAVAILABLE, "STOPPING", "stopping"))
    for peer in (in_session, waiting, stack.peer()):
        error = await peer.end()
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "STOPPING")


@pytest.mark.asyncio
async def test_large_frames(stack: Stack) -> None:
    """A StepBatch of 5 MiB gets through to the row check (E16)."""
    peer = stack.peer()
    await peer.begin(5, 7)
    result = await peer.step(first_step(new_sequences=[new_sequence(1, [2**31] * (1 << 20))]))
    assert list(result.statuses) == [pb.ROW_STATUS_BAD_INPUT]
