"""The stream to the scheduler: lost and found again, restarted schedulers, and what clients notice of it: nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from gateway_fakes import TIMEOUT, FakeScheduler, Stack, running_stack, text_of, tokens_of
from tokenizer_samples import EOS_ID, byte_level

from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.models.prepared import PreparedModel
from octavo.rpc.errors import from_rpc_error
from octavo.v1 import inference_pb2

TEXT = "the cat sat 😀 on the mat"
TOKENS = [*byte_level().tokenizer.encode(TEXT).ids, EOS_ID]


async def read_tokens(call: Any, count: int) -> list[inference_pb2.GenerateResponse]:
    """Read from a stream until it has so many tokens; return what was read."""
    events: list[inference_pb2.GenerateResponse] = []
    while sum(len(event.delta.token_ids) for event in events) < count:
        events.append(await asyncio.wait_for(call.read(), TIMEOUT))
    return events


async def read_rest(call: Any) -> list[inference_pb2.GenerateResponse]:
    """Read a stream to its end."""
    events: list[inference_pb2.GenerateResponse] = []
    while (event := await asyncio.wait_for(call.read(), TIMEOUT)) is not grpc.aio.EOF:
        events.append(event)
    return events


async def start_stream(stack: Stack, num_tokens: int) -> tuple[Any, list[inference_pb2.GenerateResponse]]:
    """Start a stream and let it get so many tokens."""
    call = stack.inference.Generate(inference_pb2.GenerateRequest(text=TEXT))
    await stack.scheduler.wait_received("submit")
    stack.scheduler.step(num_tokens)
    return call, await read_tokens(call, num_tokens)


@pytest.mark.asyncio
async def test_stream_is_lost_and_the_scheduler_lives(prepared: PreparedModel) -> None:
    """Hello names the live request, the scheduler knows it, goes on, and says again what it may have said before."""
    scheduler = FakeScheduler(auto=False)
    async with running_stack(prepared, scheduler) as stack:
        call, events = await start_stream(stack, 4)
        counter = scheduler.of_kind("submit")[0].request
        scheduler.end_stream()
        first, second = await scheduler.wait_received("hello", 2)
        assert (second.incarnation, list(second.live_requests)) == (first.incarnation, [counter])
        assert (first.highest_term, second.highest_term) == (0, 1)
        for sequence, (start, stop) in enumerate([(0, 2), (2, 4), (1, 6)], start=1):
            output = scheduler_pb2.ChoiceOutput(request=counter, first_token_index=start, token_ids=TOKENS[start:stop])
            scheduler.send(step_outputs=scheduler_pb2.StepOutputs(sequence=sequence, outputs=[output]))
        scheduler.sequence = 3
        scheduler.running[counter].num_sent = [6]
        scheduler.step(len(TOKENS))
        events += await read_rest(call)
        assert tokens_of(events) == TOKENS
        assert text_of(events) == TEXT
        assert len(scheduler.of_kind("submit")) == 1


@pytest.mark.asyncio
async def test_rows_are_tokens_too(prepared: PreparedModel) -> None:
    """What comes as a row of columns is applied as an output is, and one that is known already is dropped."""
    scheduler = FakeScheduler(auto=False)
    async with running_stack(prepared, scheduler) as stack:
        call, events = await start_stream(stack, 0)
        counter = scheduler.of_kind("submit")[0].request
        for sequence, index in enumerate((0, 1, 1, 2), start=1):
            step = scheduler_pb2.StepOutputs(
                sequence=sequence, requests=[counter], choices=[0], token_indexes=[index], token_ids=[TOKENS[index]]
            )
            scheduler.send(step_outputs=step)
        scheduler.sequence = 4
        scheduler.running[counter].num_sent = [3]
        scheduler.step(len(TOKENS))
        events += await read_rest(call)
        assert tokens_of(events) == TOKENS


@pytest.mark.asyncio
async def test_columns_of_different_lengths_end_the_stream(prepared: PreparedModel) -> None:
    """A frame that breaks the contract applies nothing of its rows: the gateway attaches again and goes on."""
    scheduler = FakeScheduler(auto=False)
    async with running_stack(prepared, scheduler) as stack:
        call, events = await start_stream(stack, 0)
        counter = scheduler.of_kind("submit")[0].request
        step = scheduler_pb2.StepOutputs(sequence=1, requests=[counter, counter], choices=[0], token_ids=TOKENS[:1])
        scheduler.send(step_outputs=step)
        await scheduler.wait_received("hello", 2)
        scheduler.step(len(TOKENS))
        events += await read_rest(call)
        assert tokens_of(events) == TOKENS


@pytest.mark.asyncio
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
async def test_scheduler_restarts(prepared: PreparedModel, num_tokens: int) -> None:
    """A new scheduler gets the whole record again with the tokens so far; the client sees no gap and no duplicate."""
    scheduler = FakeScheduler(auto=False)
    async with running_stack(prepared, scheduler) as stack:
        call, events = await start_stream(stack, num_tokens)
        await scheduler.stop()
        scheduler.forget()
        await stack.wait_health(False)
        await scheduler.start()
        first, again = await scheduler.wait_received("submit", 2)
        assert list(again.choices[0].token_ids) == TOKENS[:num_tokens]
        assert (first.accepted, again.accepted) == (False, True)
        assert again.age.ToNanoseconds() > first.age.ToNanoseconds()
        for field in ("request", "label", "model", "model_revision", "prompt_token_ids", "sampling", "stopping"):
            assert getattr(again, field) == getattr(first, field)
        scheduler.step(len(TOKENS))
        events += await read_rest(call)
        assert tokens_of(events) == TOKENS
        assert text_of(events) == TEXT
        kinds = [event.WhichOneof("event") for event in events]
        assert (kinds.count("started"), kinds.count("choice_finished"), kinds.count("usage")) == (1, 1, 1)


@pytest.mark.asyncio
async def test_restart_with_ended_choices(prepared: PreparedModel) -> None:
    """Of a request with an ended choice the record says so; only the other choice goes on."""
    scheduler = FakeScheduler(script=lambda submit, choice: TOKENS if choice else [5, 6, EOS_ID], auto=False)
    async with running_stack(prepared, scheduler) as stack:
        call = stack.inference.Generate(inference_pb2.GenerateRequest(text=TEXT, n=2))
        await scheduler.wait_received("submit")
        scheduler.step(4)
        events = await read_tokens(call, 7)
        await scheduler.stop()
        scheduler.forget()
        await scheduler.start()
        again = (await scheduler.wait_received("submit", 2))[1]
        ended, running = again.choices
        assert (list(ended.token_ids), ended.end.stop_token_id) == ([5, 6, EOS_ID], EOS_ID)
        assert ended.end.reason == scheduler_pb2.FINISH_REASON_STOP
        assert (list(running.token_ids), running.HasField("end")) == (TOKENS[:4], False)
        scheduler.step(len(TOKENS))
        events += await read_rest(call)
        assert (tokens_of(events, 0), tokens_of(events, 1)) == ([5, 6, EOS_ID], TOKENS)


@pytest.mark.asyncio
async def test_many_streams_over_many_restarts(prepared: PreparedModel) -> None:
    """Streams that outlive several schedulers are each whole."""
    scheduler = FakeScheduler(auto=False)
    texts = [f"the cat {index} sat 😀" for index in range(20)]
    async with running_stack(prepared, scheduler) as stack:
        requests = [inference_pb2.GenerateRequest(text=text) for text in texts]
        tasks = [asyncio.create_task(stack.generate(request)) for request in requests]
        await scheduler.wait_received("submit", len(texts))
        for _ in range(4):
            scheduler.step(2)
            await scheduler.stop()
            scheduler.forget()
            submitted = len(scheduler.of_kind("submit"))
            await scheduler.start()
            await scheduler.wait_received("submit", submitted + len(texts))
        scheduler.step(40)
        results = await asyncio.gather(*tasks)
        assert [text_of(events) for events in results] == texts
        for text, events in zip(texts, results, strict=True):
            assert tokens_of(events) == [*byte_level().tokenizer.encode(text).ids, EOS_ID]


@pytest.mark.asyncio
async def test_away_scheduler(prepared: PreparedModel) -> None:
    """Without a scheduler new requests are UNAVAILABLE with when to try again, live ones wait, health says so."""
    scheduler = FakeScheduler(auto=False)
    async with running_stack(prepared, scheduler) as stack:
        call, events = await start_stream(stack, 2)
        await scheduler.stop()
        await stack.wait_health(False)
        await stack.wait_health(False, f"model/{prepared.name}")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stack.generate(inference_pb2.GenerateRequest(text=TEXT))
        error = from_rpc_error(raised.value)
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_SCHEDULER")
        assert error.retry_delay is not None
        await scheduler.start()
        await scheduler.wait_received("hello", 2)
        scheduler.step(len(TOKENS))
        assert tokens_of(events + await read_rest(call)) == TOKENS


@pytest.mark.asyncio
async def test_cancelled_while_the_scheduler_is_away(prepared: PreparedModel) -> None:
    """A request that its client left while the scheduler was away ends there once it is back, and is taken up no more:
    Hello does not name it, or, where the gateway had already begun to dial, a Cancel follows.
    """
    scheduler = FakeScheduler(auto=False)
    async with running_stack(prepared, scheduler) as stack:
        call, _ = await start_stream(stack, 2)
        await scheduler.stop()
        await stack.wait_health(False)
        call.cancel()
        await stack.wait_empty()
        await scheduler.start()
        await scheduler.wait_until(lambda: scheduler.running == {})
        await stack.wait_health(True)
        assert len(scheduler.of_kind("submit")) == 1


@pytest.mark.asyncio
async def test_deadline_while_the_scheduler_is_away(prepared: PreparedModel) -> None:
    """The gateway itself enforces deadlines of requests that wait for a scheduler."""
    scheduler = FakeScheduler(auto=False)
    async with running_stack(prepared, scheduler) as stack:
        request = inference_pb2.GenerateOnceRequest(request=inference_pb2.GenerateRequest(text=TEXT))
        call = asyncio.ensure_future(stack.inference.GenerateOnce(request, timeout=0.3))
        await scheduler.wait_received("submit")
        await scheduler.stop()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await stack.wait_empty()


@pytest.mark.asyncio
async def test_cancel_crosses_welcome(prepared: PreparedModel) -> None:
    """A cancel between Hello and Welcome is sent behind Hello, and the request is not submitted again."""
    scheduler = FakeScheduler(auto=False)
    async with running_stack(prepared, scheduler) as stack:
        call, _ = await start_stream(stack, 2)
        scheduler.begins_with_welcome = False
        scheduler.pools = []
        # The empty ModelPools that would follow is held back by taking the frame out of the scheduler's hands.
        scheduler.forget()
        original = scheduler._welcome
        held: list[scheduler_pb2.Hello] = []
        scheduler._welcome = held.append  # type: ignore[method-assign]
        scheduler.end_stream()
        await scheduler.wait_until(lambda: bool(held))
        call.cancel()
        await scheduler.wait_received("cancel")
        scheduler.begins_with_welcome = True
        original(held[0])
        assert list(held[0].live_requests) == [scheduler.of_kind("submit")[0].request]
        await stack.wait_empty()
        assert len(scheduler.of_kind("submit")) == 1


@pytest.mark.asyncio
async def test_lower_term_is_refused(prepared: PreparedModel) -> None:
    """A scheduler with a lower term than one seen before is not worked with; one with the highest is."""
    scheduler = FakeScheduler(term=7, auto=False)
    async with running_stack(prepared, scheduler) as stack:
        call, events = await start_stream(stack, 2)
        scheduler.term = 6
        scheduler.end_stream()
        await scheduler.wait_received("hello", 4)
        await stack.wait_health(False)
        assert {hello.highest_term for hello in scheduler.of_kind("hello")[1:]} == {7}
        scheduler.term = 7
        await stack.wait_health(True)
        scheduler.step(len(TOKENS))
        assert tokens_of(events + await read_rest(call)) == TOKENS


@pytest.mark.asyncio
async def test_stream_that_does_not_begin_with_welcome(prepared: PreparedModel) -> None:
    """A peer that begins with anything but Welcome is left, and tried again."""
    scheduler = FakeScheduler(auto=False)
    async with running_stack(prepared, scheduler) as stack:
        scheduler.begins_with_welcome = False
        scheduler.end_stream()
        await scheduler.wait_received("hello", 3)
        await stack.wait_health(False)
        scheduler.begins_with_welcome = True
        await stack.wait_health(True)


@pytest.mark.asyncio
async def test_outputs_of_unknown_requests_change_nothing(prepared: PreparedModel) -> None:
    """Frames about requests that are not live are dropped, and acknowledged like others."""
    scheduler = FakeScheduler(auto=False)
    async with running_stack(prepared, scheduler) as stack:
        scheduler.send_outputs(scheduler_pb2.ChoiceOutput(request=999, first_token_index=7, token_ids=[5]))
        scheduler.send(accepted=scheduler_pb2.Accepted(request=999))
        scheduler.send(rejected=scheduler_pb2.Rejected(request=999))
        scheduler.send(finished=scheduler_pb2.Finished(request=999, sequence=2))
        scheduler.send(load_report=scheduler_pb2.LoadReport())
        scheduler.send()
        await scheduler.wait_until(lambda: scheduler.acknowledged == 2)
        call, events = await start_stream(stack, 1)
        scheduler.step(len(TOKENS))
        assert tokens_of(events + await read_rest(call)) == TOKENS
