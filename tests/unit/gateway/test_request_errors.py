"""How requests fail: a gRPC status with details, before anything is queued where the request is at fault."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from gateway_fakes import FakeScheduler, Stack, pool_of, running_stack
from google.protobuf import duration_pb2
from prepared_samples import MakePrepared
from tokenizer_samples import BOS_ID, byte_level

from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.models.prepared import PreparedModel
from octavo.rpc.errors import ServiceError, from_rpc_error
from octavo.v1 import inference_pb2

VOCAB_SIZE = 320
USER, SYSTEM = inference_pb2.CHAT_ROLE_USER, inference_pb2.CHAT_ROLE_SYSTEM


@pytest_asyncio.fixture
async def stack(prepared: PreparedModel) -> AsyncIterator[Stack]:
    """A gateway whose scheduler sends nothing by itself."""
    async with running_stack(prepared, FakeScheduler(auto=False)) as running:
        yield running


async def failure_of(call: Any) -> ServiceError:
    """Return the error that a call ends with."""

    async def run() -> None:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call

    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await run()
    return from_rpc_error(raised.value)


async def refusal_of(stack: Stack, request: inference_pb2.GenerateRequest) -> ServiceError:
    """Return the error of a request that must fail alike in stream and unary, and never be submitted."""
    error = await failure_of(stack.inference.Generate(request, timeout=10))
    wrapped = inference_pb2.GenerateOnceRequest(request=request)
    other = await failure_of(stack.inference.GenerateOnce(wrapped, timeout=10))
    assert (error.code, error.reason, error.violations) == (other.code, other.reason, other.violations)
    assert stack.scheduler.of_kind("submit") == []
    assert len(stack.gateway.live) == 0
    return error


def fields_of(error: ServiceError) -> list[str]:
    """Return the fields that an INVALID_ARGUMENT names."""
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.reason == "INVALID_REQUEST"
    return [violation.field for violation in error.violations]


def chat_of(*turns: tuple[int, str]) -> inference_pb2.ChatInput:
    """Return a conversation."""
    messages = [inference_pb2.ChatMessage(role=role, content=text) for role, text in turns]
    return inference_pb2.ChatInput(messages=messages)


@pytest.mark.asyncio
async def test_every_bad_field_is_named_at_once(stack: Stack) -> None:
    """One error names all the bad fields of a request, the input's among them, each with what it wants."""
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[5] * 2000),
        sampling=inference_pb2.SamplingConfig(
            temperature=float("nan"),
            top_p=0,
            min_p=1.5,
            repetition_penalty=float("inf"),
            presence_penalty=-2.5,
            frequency_penalty=float("-inf"),
            typical_p=float("nan"),
            logit_bias=[
                inference_pb2.LogitBias(token_id=VOCAB_SIZE),
                inference_pb2.LogitBias(token_id=5, bias=100),
                inference_pb2.LogitBias(token_id=5, bias=-100),
                inference_pb2.LogitBias(token_id=6, bias=float("nan")),
                inference_pb2.LogitBias(token_id=7, bias=float("inf")),
                inference_pb2.LogitBias(token_id=8, bias=-100.5),
            ],
            bad_words=["fine", "", "x" * 257, "x" * 40],
        ),
        stopping=inference_pb2.StoppingConfig(stop_token_ids=[VOCAB_SIZE], stop=["", "fine", "x" * 1025]),
        output=inference_pb2.OutputConfig(top_logprobs=21, prompt_logprobs=21),
        n=129,
        best_of=130,
        truncate_prompt_tokens=0,
        request_id="x" * 129,
    )
    error = await refusal_of(stack, request)
    assert fields_of(error) == [
        "token_ids.ids",
        "sampling.temperature",
        "sampling.top_p",
        "sampling.min_p",
        "sampling.repetition_penalty",
        "sampling.presence_penalty",
        "sampling.frequency_penalty",
        "sampling.typical_p",
        "sampling.logit_bias[0].token_id",
        "sampling.logit_bias[2].token_id",
        "sampling.logit_bias[3].bias",
        "sampling.logit_bias[4].bias",
        "sampling.logit_bias[5].bias",
        "n",
        "output.top_logprobs",
        "output.prompt_logprobs",
        "truncate_prompt_tokens",
        "stopping.stop[0]",
        "stopping.stop[2]",
        "stopping.stop_token_ids",
        "request_id",
        "best_of",
        "sampling.bad_words[1]",
        "sampling.bad_words[2]",
    ]
    assert all(violation.field in error.message for violation in error.violations)
    assert "2000 tokens; the model takes 1024" in error.violations[0].description


@pytest.mark.asyncio
async def test_no_input(stack: Stack) -> None:
    """Without an input, and without a request in the unary call's wrapper, the input is asked for."""
    assert fields_of(await refusal_of(stack, inference_pb2.GenerateRequest())) == ["input"]
    error = await failure_of(stack.inference.GenerateOnce(inference_pb2.GenerateOnceRequest()))
    assert fields_of(error) == ["input"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"text": ""}, "text"),
        ({"token_ids": inference_pb2.TokenIds()}, "token_ids.ids"),
        ({"chat": inference_pb2.ChatInput()}, "chat.messages"),
    ],
)
async def test_empty_inputs(stack: Stack, fields: dict[str, Any], named: str) -> None:
    """An input that comes to no token is refused, whatever its kind (E1)."""
    assert fields_of(await refusal_of(stack, inference_pb2.GenerateRequest(**fields))) == [named]


@pytest.mark.asyncio
async def test_empty_text_with_a_bos(make_prepared: MakePrepared) -> None:
    """Where the tokenizer adds a BOS, empty text is a prompt of that one token (E1)."""
    async with running_stack(make_prepared(sample=byte_level(add_bos=True))) as stack:
        await stack.generate(inference_pb2.GenerateRequest(text=""))
        assert list(stack.scheduler.of_kind("submit")[0].prompt_token_ids) == [BOS_ID]


@pytest.mark.asyncio
async def test_only_special_tokens(prepared: PreparedModel) -> None:
    """A prompt of special tokens alone is an ordinary prompt (E1)."""
    async with running_stack(prepared) as stack:
        await stack.generate(inference_pb2.GenerateRequest(text="</s><s>"))
        await stack.generate(inference_pb2.GenerateRequest(token_ids={"ids": [0]}))
        assert len(stack.scheduler.of_kind("submit")) == 2


@pytest.mark.asyncio
@pytest.mark.parametrize("bad", [VOCAB_SIZE, VOCAB_SIZE + 1, 2**31, 2**32 - 1])
async def test_token_ids_outside_the_vocabulary(stack: Stack, bad: int) -> None:
    """The first id outside the vocabulary is named with its place, in the input and in the stop tokens (E2)."""
    request = inference_pb2.GenerateRequest(token_ids={"ids": [VOCAB_SIZE - 1, bad, bad]})
    error = await refusal_of(stack, request)
    assert fields_of(error) == ["token_ids.ids"]
    assert f"id {bad} at index 1" in error.message
    request = inference_pb2.GenerateRequest(text="a", stopping={"stop_token_ids": [bad]})
    assert fields_of(await refusal_of(stack, request)) == ["stopping.stop_token_ids"]


@pytest.mark.asyncio
async def test_the_last_token_id_is_allowed(prepared: PreparedModel) -> None:
    """The highest id of the vocabulary is an ordinary one, though the tokenizer has no token for it (E2)."""
    async with running_stack(prepared) as stack:
        await stack.generate(inference_pb2.GenerateRequest(token_ids={"ids": [VOCAB_SIZE - 1]}))


@pytest.mark.asyncio
async def test_prompt_at_the_edge_of_the_context(prepared: PreparedModel) -> None:
    """A prompt that fills the context is refused with the numbers; one token less leaves room for one of output."""
    async with running_stack(prepared, max_model_len=16) as stack:
        for length in (16, 17):
            request = inference_pb2.GenerateRequest(token_ids={"ids": [5] * length})
            error = await refusal_of(stack, request)
            assert fields_of(error) == ["token_ids.ids"]
            assert f"{length} tokens; the model takes 16" in error.message
            own = str(prepared.max_position_embeddings)
            assert error.metadata == {"max_model_len": "16", "max_position_embeddings": own}
        events = await stack.generate(inference_pb2.GenerateRequest(token_ids={"ids": [5] * 15}))
        assert events[0].started.max_tokens == 1


@pytest.mark.asyncio
async def test_too_long_text_and_chat_name_their_own_field(make_prepared: MakePrepared) -> None:
    """The field at fault is the one the client filled, not the tokens it became."""
    async with running_stack(make_prepared(), FakeScheduler(auto=False), max_model_len=8) as stack:
        request = inference_pb2.GenerateRequest(text="the cat sat on the mat")
        assert fields_of(await refusal_of(stack, request)) == ["text"]
        request = inference_pb2.GenerateRequest(chat=chat_of((USER, "the cat sat on the mat")))
        assert fields_of(await refusal_of(stack, request)) == ["chat.messages"]


@pytest.mark.asyncio
async def test_min_tokens_above_what_the_output_can_have(prepared: PreparedModel) -> None:
    """min_tokens is held against max_tokens as the context clamps it."""
    async with running_stack(prepared, FakeScheduler(auto=False), max_model_len=16) as stack:
        for stopping in ({"max_tokens": 3, "min_tokens": 4}, {"min_tokens": 12}):
            request = inference_pb2.GenerateRequest(token_ids={"ids": [5] * 5}, stopping=stopping)
            assert fields_of(await refusal_of(stack, request)) == ["stopping.min_tokens"]


@pytest.mark.asyncio
async def test_roles_and_templates(stack: Stack) -> None:
    """Each message without a role is named; what the template has against the messages is said in its own words."""
    turns = [(USER, "a"), (inference_pb2.CHAT_ROLE_UNSPECIFIED, "b"), (9, "c")]
    error = await refusal_of(stack, inference_pb2.GenerateRequest(chat=chat_of(*turns)))
    assert fields_of(error) == ["chat.messages[1].role", "chat.messages[2].role"]
    error = await refusal_of(stack, inference_pb2.GenerateRequest(chat=chat_of((USER, "a"), (SYSTEM, "b"))))
    assert fields_of(error) == ["chat.messages"]
    assert "system messages go first" in error.message


@pytest.mark.asyncio
async def test_thousands_of_bad_messages(stack: Stack) -> None:
    """However much is wrong, the error fits the trailers that carry it."""
    turns = [(inference_pb2.CHAT_ROLE_UNSPECIFIED, "b")] * 4000
    error = await refusal_of(stack, inference_pb2.GenerateRequest(chat=chat_of(*turns)))
    assert fields_of(error)[0] == "chat.messages[0].role"
    assert "4000 messages" in error.message


@pytest.mark.asyncio
async def test_a_conversation_has_an_end(stack: Stack) -> None:
    """More messages than any model could take are refused at once, good and bad ones alike, with both numbers."""
    error = await refusal_of(stack, inference_pb2.GenerateRequest(chat=chat_of(*[(USER, "b")] * 4097)))
    assert fields_of(error) == ["chat.messages"]
    assert "4097 messages, at most 4096 go" in error.message


@pytest.mark.asyncio
async def test_chat_without_a_template(make_prepared: MakePrepared) -> None:
    """A model without a chat template says what to send instead."""
    prepared = make_prepared(chat_template=None)
    async with running_stack(prepared, FakeScheduler(auto=False)) as stack:
        error = await refusal_of(stack, inference_pb2.GenerateRequest(chat=chat_of((USER, "a"))))
        assert fields_of(error) == ["chat"]
        assert "send text or token_ids" in error.message


@pytest.mark.asyncio
async def test_unknown_model(stack: Stack) -> None:
    """A model that is not served is NOT_FOUND, with the names that are; a name of any length is answered."""
    for name in ("other", "é" * 100_000):
        error = await refusal_of(stack, inference_pb2.GenerateRequest(model=name, text="a"))
        assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
        assert error.metadata == {"served": "tiny"}
    for call in (
        stack.inference.Tokenize(inference_pb2.TokenizeRequest(model="other", text="a")),
        stack.inference.Detokenize(inference_pb2.DetokenizeRequest(model="other")),
    ):
        assert (await failure_of(call)).code is grpc.StatusCode.NOT_FOUND


@pytest.mark.asyncio
async def test_nothing_to_run_the_model(stack: Stack) -> None:
    """Without a ready executor requests are UNAVAILABLE with when to try again; bad ones are still told what is bad."""
    request = inference_pb2.GenerateRequest(text="a")
    for pools in ([], [pool_of(stack.prepared, num_executors=0)]):
        stack.scheduler.send_pools(pools)
        await stack.wait_health(False)
        error = await refusal_of(stack, request)
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_EXECUTOR")
        assert error.retry_delay is not None
        assert fields_of(await refusal_of(stack, inference_pb2.GenerateRequest(text="a", n=0))) == ["n"]
        stack.scheduler.send_pools([pool_of(stack.prepared)])
        await stack.wait_health(True)


@pytest.mark.asyncio
async def test_another_revision_in_the_cell(stack: Stack) -> None:
    """Where the cell runs another revision of the model, requests are refused with both hashes."""
    pool = pool_of(stack.prepared)
    pool.model_revision = "f" * 64
    stack.scheduler.send_pools([pool])
    await stack.wait_health(False)
    error = await refusal_of(stack, inference_pb2.GenerateRequest(text="a"))
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "MODEL_REVISION_MISMATCH")
    assert error.metadata == {"gateway_revision": stack.prepared.revision, "cell_revision": "f" * 64}


@pytest.mark.asyncio
@pytest.mark.parametrize("terminal", ["rejected", "finished"])
async def test_the_schedulers_errors_reach_the_client(stack: Stack, terminal: str) -> None:
    """An error of the scheduler is the client's status with all its details, and is not answered with a Cancel (F6)."""
    scheduler = stack.scheduler
    scheduler.accepts = False
    call = stack.inference.Generate(inference_pb2.GenerateRequest(text="a"))
    (submit,) = await scheduler.wait_received("submit")
    error = scheduler_pb2.RequestError(
        code=8,
        reason="QUEUE_FULL",
        message="the queue is full",
        metadata={"limit": "4"},
        field="n",
        retry_delay=duration_pb2.Duration(seconds=2),
    )
    if terminal == "rejected":
        scheduler.send(rejected=scheduler_pb2.Rejected(request=submit.request, error=error))
    else:
        scheduler.send(accepted=scheduler_pb2.Accepted(request=submit.request))
        scheduler.send(finished=scheduler_pb2.Finished(sequence=1, request=submit.request, error=error))
    received = await failure_of(call)
    assert (received.code, received.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert (received.message, received.metadata) == ("the queue is full", {"limit": "4"})
    assert [violation.field for violation in received.violations] == ["n"]
    assert received.retry_delay == 2
    await stack.wait_empty()
    assert scheduler.of_kind("cancel") == []
    # A refusal has no headers, so that a client's transport may try again by itself.
    assert list(await call.initial_metadata()) == [] or terminal == "finished"


def test_no_response_has_a_field_for_errors() -> None:
    """Errors are statuses alone: no message that clients get has a field for one (F6)."""
    for message in inference_pb2.DESCRIPTOR.message_types_by_name.values():
        assert not [field.name for field in message.fields if "error" in field.name or "status" in field.name]


def output_of(submit: scheduler_pb2.Submit, **fields: Any) -> scheduler_pb2.ChoiceOutput:
    """Return an output for a request."""
    return scheduler_pb2.ChoiceOutput(request=submit.request, **fields)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "fields",
    [
        {"first_token_index": 3, "token_ids": [5]},
        {"first_token_index": 1, "token_ids": [9, 5]},
        {"choice": 1, "token_ids": [5]},
        {"first_token_index": 2, "token_ids": [5], "end": scheduler_pb2.ChoiceEnd(reason=99)},
    ],
    ids=["gap", "changed token", "choice", "reason"],
)
async def test_output_that_contradicts_the_record(
    stack: Stack, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A gap, a changed token, a strange choice or reason fails that request alone, is logged, and cancels it."""
    scheduler = stack.scheduler
    call = stack.inference.Generate(inference_pb2.GenerateRequest(text="a"))
    (submit,) = await scheduler.wait_received("submit")
    scheduler.send_outputs(output_of(submit, token_ids=[5, 6]))
    with caplog.at_level(logging.ERROR):
        scheduler.send_outputs(output_of(submit, **fields))
        error = await failure_of(call)
    assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "OUTPUT_FAULT")
    assert [record.message for record in caplog.records] == ["output contradicts the record"]
    (cancel,) = await scheduler.wait_received("cancel")
    assert cancel.request == submit.request


@pytest.mark.asyncio
async def test_finished_before_its_choices(stack: Stack) -> None:
    """A request that the scheduler calls finished while a choice has no end is a fault, not an output cut short."""
    call = stack.inference.Generate(inference_pb2.GenerateRequest(text="a"))
    (submit,) = await stack.scheduler.wait_received("submit")
    stack.scheduler.send(finished=scheduler_pb2.Finished(sequence=1, request=submit.request))
    assert (await failure_of(call)).code is grpc.StatusCode.INTERNAL


@pytest.mark.asyncio
async def test_cancelled_in_the_cell(stack: Stack) -> None:
    """A choice that the cell cancelled by itself ends the call with CANCELLED, not as if it were complete."""
    call = stack.inference.Generate(inference_pb2.GenerateRequest(text="a"))
    (submit,) = await stack.scheduler.wait_received("submit")
    end = scheduler_pb2.ChoiceEnd(reason=scheduler_pb2.FINISH_REASON_CANCELLED)
    stack.scheduler.send_outputs(output_of(submit, token_ids=[5], end=end))
    error = await failure_of(call)
    assert (error.code, error.reason) == (grpc.StatusCode.CANCELLED, "CANCELLED_IN_CELL")
