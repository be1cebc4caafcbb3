"""Requests that outlive their clients, and those that do not."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from cell_of_tests import CELL
from gateway_fakes import TIMEOUT, FakeScheduler, running_stack
from tokenizer_samples import EOS_ID, byte_level

from gateway.resume_tokens import ResumeTokens
from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.models.prepared import PreparedModel
from octavo.rpc.errors import from_rpc_error
from octavo.v1 import inference_pb2

KEY = "k" * 16
TEXT = "the cat sat on the mat"
TOKENS = [*byte_level().tokenizer.encode(TEXT).ids, EOS_ID]


def asked(seconds: float = 30.0) -> inference_pb2.GenerateRequest:
    """A request that may be taken up."""
    request = inference_pb2.GenerateRequest(text=TEXT)
    request.resume_grace.FromNanoseconds(round(seconds * 1e9))
    return request


async def start(stack: Any, request: inference_pb2.GenerateRequest) -> tuple[Any, inference_pb2.Started]:
    """Start a stream and read until it has a token."""
    call = stack.inference.Generate(request)
    await stack.scheduler.wait_received("submit")
    stack.scheduler.step(2)
    first = await asyncio.wait_for(call.read(), TIMEOUT)
    await asyncio.wait_for(call.read(), TIMEOUT)
    return call, first.started


async def read_to_the_end(call: Any) -> None:
    """Read what is left of a stream."""
    while await asyncio.wait_for(call.read(), TIMEOUT) is not grpc.aio.EOF:
        pass


@pytest.mark.asyncio
async def test_a_lost_client_is_a_cancel_unless_it_asked_for_grace(prepared: PreparedModel) -> None:
    """Without a grace the scheduler hears of the end; with one the request is submitted with it, and lives on."""
    async with running_stack(prepared, FakeScheduler(auto=False), resume_key=KEY) as stack:
        call, started = await start(stack, asked())
        (submit,) = stack.scheduler.of_kind("submit")
        assert submit.resume_grace.seconds == 30
        assert submit.gateway_state
        assert ResumeTokens(KEY, CELL).open(started.resume_token, "default", "t") == (
            submit.first_gateway,
            submit.first_request,
        )
        call.cancel()
        plain = stack.inference.Generate(inference_pb2.GenerateRequest(text=TEXT))
        (_, second) = await stack.scheduler.wait_received("submit", 2)
        assert not second.HasField("resume_grace")
        plain.cancel()
        (cancel,) = await stack.scheduler.wait_received("cancel")
        assert cancel.request == second.request
        assert len(stack.gateway.live) == 1
        stack.scheduler.step(len(TOKENS))
        async with asyncio.timeout(TIMEOUT):
            await stack.gateway.live.wait_empty()


@pytest.mark.asyncio
async def test_the_grace_ends(prepared: PreparedModel) -> None:
    """A request that nobody takes up within its grace is cancelled."""
    async with running_stack(prepared, FakeScheduler(auto=False), resume_key=KEY) as stack:
        call, _ = await start(stack, asked(0.05))
        call.cancel()
        (cancel,) = await stack.scheduler.wait_received("cancel")
        assert cancel.reason == scheduler_pb2.CANCEL_REASON_CLIENT
        assert len(stack.gateway.live) == 0


@pytest.mark.asyncio
async def test_who_says_that_it_is_not_wanted_ends_it(prepared: PreparedModel) -> None:
    """CancelGenerate ends it with its reader, here or, unknown here, by way of the scheduler; a bad token is named."""
    async with running_stack(prepared, FakeScheduler(auto=False), resume_key=KEY) as stack:
        call, started = await start(stack, asked())
        cancel = inference_pb2.CancelGenerateRequest(resume_token=started.resume_token)
        await stack.inference.CancelGenerate(cancel, timeout=TIMEOUT)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await read_to_the_end(call)
        error = from_rpc_error(raised.value)
        assert (error.code, error.reason) == (grpc.StatusCode.CANCELLED, "CANCELLED_BY_CLIENT")
        await stack.scheduler.wait_received("cancel")
        elsewhere = ResumeTokens(KEY, CELL).make(("cd" * 16, 9), "default")
        await stack.inference.CancelGenerate(
            inference_pb2.CancelGenerateRequest(resume_token=elsewhere), timeout=TIMEOUT
        )
        (take_up,) = await stack.scheduler.wait_received("take_up")
        assert (take_up.first_gateway, take_up.first_request) == ("cd" * 16, 9)
        cancels = await stack.scheduler.wait_received("cancel", 2)
        assert cancels[1].request == take_up.request
        for token in ("", "nonsense"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stack.inference.CancelGenerate(inference_pb2.CancelGenerateRequest(resume_token=token))
            assert [each.field for each in from_rpc_error(refused.value).violations] == ["resume_token"]


@pytest.mark.asyncio
async def test_a_stream_is_taken_up(prepared: PreparedModel) -> None:
    """What the scheduler hands over is told from the position on, and what comes then; not found is NOT_FOUND."""
    async with running_stack(prepared, FakeScheduler(auto=False), resume_key=KEY) as stack:
        call, started = await start(stack, asked())
        (submit,) = stack.scheduler.of_kind("submit")
        call.cancel()
        request = inference_pb2.GenerateRequest()
        request.resume.token = started.resume_token
        request.resume.positions.add(choice=0, num_tokens=1, text_bytes=len(TEXT[:1]))
        resumed = stack.inference.Generate(request)
        (take_up,) = await stack.scheduler.wait_received("take_up")
        record = scheduler_pb2.Submit()
        record.CopyFrom(submit)
        record.choices[0].token_ids.extend(TOKENS[:3])
        taken = scheduler_pb2.TakenUp(request=take_up.request, record=record)
        stack.scheduler.send(taken_up=taken)
        for sequence, index in enumerate(range(3, len(TOKENS)), start=stack.scheduler.sequence + 1):
            output = scheduler_pb2.ChoiceOutput(
                request=take_up.request, first_token_index=index, token_ids=TOKENS[index : index + 1]
            )
            if index == len(TOKENS) - 1:
                output.end.reason = scheduler_pb2.FINISH_REASON_STOP
                output.end.stop_token_id = EOS_ID
            stack.scheduler.send(step_outputs=scheduler_pb2.StepOutputs(sequence=sequence, outputs=[output]))
        events = [event async for event in resumed]
        assert events[0].started.resume_token
        deltas = [event.delta for event in events if event.HasField("delta")]
        assert deltas[0].first_token_index == 1
        assert [token_id for delta in deltas for token_id in delta.token_ids] == TOKENS[1:]
        # The record is here, so the scheduler may tell whoever had it.
        assert [each.request for each in stack.scheduler.of_kind("submit")][1:] == [take_up.request]
        again = stack.inference.Generate(request)
        ask = (await stack.scheduler.wait_received("take_up", 2))[1]
        error = scheduler_pb2.RequestError(code=5, reason="NOTHING_TO_RESUME", message="gone")
        stack.scheduler.send(taken_up=scheduler_pb2.TakenUp(request=ask.request, error=error))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await asyncio.wait_for(again.read(), TIMEOUT)
        assert from_rpc_error(raised.value).reason == "NOTHING_TO_RESUME"
        stack.scheduler.step(len(TOKENS))


@pytest.mark.asyncio
async def test_a_gateway_that_stops_goes_on_naming_what_it_leaves(prepared: PreparedModel) -> None:
    """Where its stream is lost once it has closed, the next one still names the request that another may take up, and
    no other: what is not named the scheduler would cancel.
    """
    async with running_stack(prepared, FakeScheduler(auto=False), resume_key=KEY) as stack:
        call, _ = await start(stack, asked())
        plain = stack.inference.Generate(inference_pb2.GenerateRequest(text=TEXT))
        resumable, _ = await stack.scheduler.wait_received("submit", 2)
        stack.gateway.live.close()
        for ended in (call, plain):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await read_to_the_end(ended)
            assert from_rpc_error(raised.value).reason == "SHUTTING_DOWN"
        stack.scheduler.end_stream()
        (_, hello) = await stack.scheduler.wait_received("hello", 2)
        assert list(hello.live_requests) == [resumable.request]
        assert resumable.request not in [each.request for each in stack.scheduler.of_kind("cancel")]


@pytest.mark.asyncio
async def test_a_gateway_that_stops_takes_nothing_up(prepared: PreparedModel) -> None:
    """A record that comes once the gateway has closed stays whose it is: the client is told to go elsewhere, nothing is
    submitted, and nothing is cancelled.
    """
    async with running_stack(prepared, FakeScheduler(auto=False), resume_key=KEY) as stack:
        call, started = await start(stack, asked())
        (submit,) = stack.scheduler.of_kind("submit")
        request = inference_pb2.GenerateRequest()
        request.resume.token = started.resume_token
        resumed = stack.inference.Generate(request)
        (take_up,) = await stack.scheduler.wait_received("take_up")
        stack.gateway.live.close()
        stack.scheduler.send(taken_up=scheduler_pb2.TakenUp(request=take_up.request, record=submit))
        for ended in (call, resumed):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await read_to_the_end(ended)
            assert from_rpc_error(raised.value).reason == "SHUTTING_DOWN"
        assert len(stack.scheduler.of_kind("submit")) == 1
        assert not stack.scheduler.of_kind("cancel")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda request: request.resume_grace.FromSeconds(601), "resume_grace"),
        (lambda request: request.output.__setattr__("prompt_logprobs", 1), "resume_grace"),
        (lambda request: request.resume.__setattr__("token", "nonsense"), "resume.token"),
        (lambda request: (request.resume.SetInParent(), request.__setattr__("n", 2)), "resume"),
    ],
    ids=["too long", "prompt logprobs", "no token", "other fields"],
)
async def test_what_cannot_be_is_named(prepared: PreparedModel, change: Any, field: str) -> None:
    """A grace out of range or with prompt logprobs, a token that is none, a resume with anything beside it."""
    async with running_stack(prepared, FakeScheduler(auto=False), resume_key=KEY) as stack:
        once = inference_pb2.GenerateOnceRequest(request=asked())
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stack.inference.GenerateOnce(once)
        assert [each.field for each in from_rpc_error(refused.value).violations] == ["resume_grace"]
        request = inference_pb2.GenerateRequest(text=TEXT)
        request.resume_grace.seconds = 1
        if field.startswith("resume."):
            request = inference_pb2.GenerateRequest()
        change(request)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stack.inference.Generate(request).read()
        error = from_rpc_error(raised.value)
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert field in [each.field for each in error.violations]
