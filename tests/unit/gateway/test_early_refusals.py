"""Refusals by the scheduler's last word on its queues: at once, without a tokenizer, and of nothing that might fit."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from gateway_fakes import TIMEOUT, FakeScheduler, queue_of, running_stack
from gateway_page import value_of

from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.models.prepared import PreparedModel
from octavo.rpc.channel import open_channel
from octavo.rpc.errors import ServiceError, from_rpc_error
from octavo.v1 import inference_pb2, inference_pb2_grpc

TEXT = "the cat sat"


def request_of(**fields: Any) -> inference_pb2.GenerateRequest:
    """A request for text."""
    return inference_pb2.GenerateRequest(text=TEXT, **fields)


async def refusal_of(call: Any) -> ServiceError:
    """Return the error of a call of either shape."""
    reading = call.read() if isinstance(call, grpc.aio.UnaryStreamCall) else call
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await reading
    return from_rpc_error(raised.value)


@pytest.mark.asyncio
async def test_a_full_queue_refuses_at_once(prepared: PreparedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way in: the numbers, a delay by the rate that was told, counted as refused; no tokenizer is asked, nothing
    is submitted, and fields are not looked at.
    """
    scheduler = FakeScheduler()
    async with running_stack(prepared, scheduler) as stack:
        await stack.report_queues(
            queue_of(prepared, max_choices=4, drained_choices_per_second=2, drained_tokens_per_second=40)
        )

        async def encode(*_: Any, **__: Any) -> list[int]:
            raise AssertionError("the tokenizer was asked")

        for model in stack.gateway._models:
            monkeypatch.setattr(model.tokenizer, "encode", encode)
        once = inference_pb2.GenerateOnceRequest(request=request_of())
        part = inference_pb2.Continuation(text="b")
        inference = stack.inference
        for call in (
            inference.Generate(request_of()),
            inference.Generate(request_of(model=prepared.name, n=100)),
            inference.GenerateOnce(once),
            inference.Score(inference_pb2.ScoreRequest(text="a", continuations=[part])),
        ):
            error = await refusal_of(call)
            assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
            assert (error.metadata["waiting"], error.metadata["max_waiting"]) == ("4", "4")
            assert error.retry_delay == int(error.metadata["choices"]) / 2
        page = await stack.scrape()
        assert value_of(page, "octavo_requests_refused_total", code="resource_exhausted") == 4
        assert value_of(page, "octavo_requests_accepted_total") == 0
        assert not scheduler.of_kind("submit")


@pytest.mark.asyncio
async def test_what_fits_is_let_through(prepared: PreparedModel) -> None:
    """One more choice may wait: one goes through and two do not; of tokens as many as there is room for, once they are
    counted; another model's queue is nobody else's.
    """
    scheduler = FakeScheduler()
    async with running_stack(prepared, scheduler) as stack:
        other = scheduler_pb2.FullQueue(model="other", num_choices=9, max_choices=9)
        await stack.report_queues(queue_of(prepared, max_choices=5, max_tokens=12 + 5), other)
        assert (await refusal_of(stack.inference.Generate(request_of(n=2)))).reason == "QUEUE_FULL"
        short = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5] * 5))
        assert await stack.generate(short)
        # What was accepted counts until the next report does.
        error = await refusal_of(stack.inference.Generate(request_of()))
        assert (error.reason, error.metadata["waiting"]) == ("QUEUE_FULL", "5")
        await stack.report_queues(queue_of(prepared, max_choices=5, max_tokens=12 + 5), other)
        long = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5] * 6))
        error = await refusal_of(stack.inference.Generate(long))
        assert (error.reason, error.metadata["tokens"]) == ("QUEUE_FULL", "6")
        assert len(scheduler.of_kind("submit")) == 1
        page = await stack.scrape()
        assert value_of(page, "octavo_requests_refused_total", code="resource_exhausted") == 3


@pytest.mark.parametrize("answer", ["accepted", "rejected", "stream"])
@pytest.mark.asyncio
async def test_one_place_is_given_once(prepared: PreparedModel, answer: str) -> None:
    """A place is free: who comes first is submitted, and until that is answered, or its stream lost, others are refused
    as if it waited; from then on the scheduler's own count holds.
    """
    scheduler = FakeScheduler(accepts=False, auto=False)
    async with running_stack(prepared, scheduler) as stack:
        await stack.report_queues(queue_of(prepared, max_choices=5))
        first = stack.inference.Generate(request_of(), timeout=TIMEOUT)
        [submit] = await scheduler.wait_received("submit")
        error = await refusal_of(stack.inference.Generate(request_of()))
        assert (error.reason, error.metadata["waiting"]) == ("QUEUE_FULL", "5")
        if answer == "stream":
            scheduler.end_stream()
            # The next one names the first request, and it is submitted again.
            await scheduler.wait_received("submit", 2)
        elif answer == "accepted":
            scheduler.send(accepted=scheduler_pb2.Accepted(request=submit.request))
        else:
            error_of = scheduler_pb2.RequestError(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], reason="QUEUE_FULL")
            scheduler.send(rejected=scheduler_pb2.Rejected(request=submit.request, error=error_of))
        await stack.report_queues(queue_of(prepared, max_choices=5 if answer != "stream" else 6))
        num_submits = len(scheduler.of_kind("submit"))
        second = stack.inference.Generate(request_of(), timeout=TIMEOUT)
        await scheduler.wait_received("submit", num_submits + 1)
        assert (await refusal_of(stack.inference.Generate(request_of()))).reason == "QUEUE_FULL"
        for call in (first, second):
            call.cancel()
        await stack.wait_empty()


@pytest.mark.parametrize("outcome", ["submitted", "invalid", "left"])
@pytest.mark.parametrize("call", ["generate", "score"])
@pytest.mark.asyncio
async def test_a_place_is_kept_while_its_prompt_is_made_into_tokens(
    prepared: PreparedModel, monkeypatch: pytest.MonkeyPatch, call: str, outcome: str
) -> None:
    """There is one place, and who comes first has a text that takes a while: others hear at once that there is none
    left, not once their own texts are tokens. If the first one is found wanting, or leaves, the place is free again.
    """
    scheduler = FakeScheduler(accepts=False, auto=False)
    async with running_stack(prepared, scheduler) as stack:
        await stack.report_queues(queue_of(prepared, max_choices=5))
        encoding, go_on = asyncio.Event(), asyncio.Event()
        [model] = stack.gateway._models
        encode = model.tokenizer.encode

        async def slow(text: str, **options: Any) -> list[int]:
            encoding.set()
            await go_on.wait()
            return await encode(text, **options)

        monkeypatch.setattr(model.tokenizer, "encode", slow)
        if call == "generate":
            request = request_of()
            request.sampling.temperature = -1.0 if outcome == "invalid" else 1.0
            first = stack.inference.Generate(request, timeout=TIMEOUT)
            reading = asyncio.ensure_future(first.read())
        else:
            part = inference_pb2.Continuation(text="" if outcome == "invalid" else "b")
            first = stack.inference.Score(inference_pb2.ScoreRequest(text=TEXT, continuations=[part]), timeout=TIMEOUT)
            reading = asyncio.ensure_future(_answer_of(first))
        await asyncio.wait_for(encoding.wait(), TIMEOUT)
        for _ in range(3):
            error = await refusal_of(stack.inference.Generate(request_of(), timeout=TIMEOUT))
            assert (error.reason, error.metadata["waiting"]) == ("QUEUE_FULL", "5")
        if outcome == "left":
            first.cancel()
        go_on.set()
        if outcome == "submitted":
            await scheduler.wait_received("submit")
            assert (await refusal_of(stack.inference.Generate(request_of(), timeout=TIMEOUT))).reason == "QUEUE_FULL"
        else:
            await asyncio.wait({reading})
            # A gateway learns that a client has left a moment later than the client.
            while not scheduler.of_kind("submit"):
                second = stack.inference.Generate(request_of(), timeout=TIMEOUT)
                submitted = asyncio.ensure_future(scheduler.wait_received("submit"))
                refused = asyncio.ensure_future(second.read())
                await asyncio.wait({submitted, refused}, return_when=asyncio.FIRST_COMPLETED)
                second.cancel()
                submitted.cancel()
                await asyncio.gather(submitted, refused, return_exceptions=True)
        first.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await stack.wait_empty()


async def _answer_of(call: Any) -> Any:
    return await call


@pytest.mark.asyncio
async def test_rows_that_are_free_are_places(prepared: PreparedModel) -> None:
    """Two rows are free and one may wait: of ten that come at once three are submitted, and the first whatever it
    needs where an executor has nothing to do.
    """
    scheduler = FakeScheduler(accepts=False, auto=False)
    async with running_stack(prepared, scheduler) as stack:
        queue = scheduler_pb2.FullQueue(model=prepared.name, num_free_rows=2, max_choices=1)
        await stack.report_queues(queue)
        calls = [stack.inference.Generate(request_of(), timeout=TIMEOUT) for _ in range(10)]
        readings = [asyncio.ensure_future(call.read()) for call in calls]
        while sum(each.done() for each in readings) < 7:
            await asyncio.wait([each for each in readings if not each.done()], return_when=asyncio.FIRST_COMPLETED)
        assert len(await scheduler.wait_received("submit", 3)) == 3
        for call in calls:
            call.cancel()
        await asyncio.gather(*readings, return_exceptions=True)
        await stack.wait_empty()
        scheduler.end_stream()
        await scheduler.wait_received("hello", 2)
        await stack.wait_health(True)
        queue.is_idle = True
        await stack.report_queues(queue)
        call = stack.inference.Generate(request_of(n=8), timeout=TIMEOUT)
        await scheduler.wait_received("submit", 4)
        assert (await refusal_of(stack.inference.Generate(request_of()))).reason == "QUEUE_FULL"
        call.cancel()
        await stack.wait_empty()


@pytest.mark.asyncio
async def test_a_word_holds_until_the_next_and_no_longer_than_the_scheduler(prepared: PreparedModel) -> None:
    """The next report replaces it, and so does the loss of the stream."""
    scheduler = FakeScheduler()
    async with running_stack(prepared, scheduler) as stack:
        for forget in ("report", "stream"):
            await stack.report_queues(queue_of(prepared, max_choices=4))
            assert (await refusal_of(stack.inference.Generate(request_of()))).reason == "QUEUE_FULL"
            if forget == "report":
                await stack.report_queues()
            else:
                num_hellos = len(scheduler.of_kind("hello"))
                scheduler.end_stream()
                await scheduler.wait_received("hello", num_hellos + 1)
                await stack.wait_health(True)
            assert await stack.generate(request_of())


@pytest.mark.asyncio
async def test_a_stream_is_taken_up_whatever_the_queue(prepared: PreparedModel) -> None:
    """What was accepted before is owed an ending: a resume token reaches the scheduler past a full queue."""
    scheduler = FakeScheduler(auto=False)
    async with running_stack(prepared, scheduler) as stack:
        request = request_of()
        request.resume_grace.seconds = 30
        call = stack.inference.Generate(request, timeout=TIMEOUT)
        started = (await call.read()).started
        await stack.report_queues(queue_of(prepared, max_choices=4))
        again = inference_pb2.GenerateRequest(resume=inference_pb2.ResumeInput(token=started.resume_token))
        async with open_channel(f"127.0.0.1:{stack.gateway.port}") as channel:
            taking_up = inference_pb2_grpc.InferenceServiceStub(channel).Generate(again, timeout=TIMEOUT)
            reading = asyncio.ensure_future(taking_up.read())
            await scheduler.wait_received("take_up")
            taking_up.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        call.cancel()
        await stack.inference.CancelGenerate(
            inference_pb2.CancelGenerateRequest(resume_token=started.resume_token), timeout=TIMEOUT
        )
        await stack.wait_empty()
