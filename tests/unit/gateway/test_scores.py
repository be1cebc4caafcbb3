"""Score and CountTokens over real gRPC, against a scripted scheduler."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from gateway_fakes import MAX_MODEL_LEN, FakeScheduler, running_stack
from test_options import TEXT, TIMEOUT, ids_of, refusal_of

from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.models.prepared import PreparedModel
from octavo.v1 import inference_pb2


@pytest.mark.asyncio
async def test_scores(prepared: PreparedModel) -> None:
    """Each continuation is scored by itself behind the input, text as the tokenizer writes it with nothing added."""
    async with running_stack(prepared) as stack:
        request = inference_pb2.ScoreRequest(
            text="the cat",
            continuations=[
                inference_pb2.Continuation(text=" sat"),
                inference_pb2.Continuation(token_ids=inference_pb2.TokenIds(ids=[5, 9])),
            ],
            request_id="mine",
        )
        answer = await stack.inference.Score(request, timeout=TIMEOUT)
        submits = stack.scheduler.of_kind("submit")
        wanted = [ids_of(" sat"), [5, 9]]
        assert [list(submit.prompt_token_ids) for submit in submits] == [[*ids_of("the cat"), *ids] for ids in wanted]
        assert {submit.label for submit in submits} == {"mine"}
        # Nothing is asked of the input, so that all of it but its last token may be cached.
        assert {submit.sampling.prompt_logprobs_from for submit in submits} == {len(ids_of("the cat"))}
        for score, token_ids in zip(answer.scores, wanted, strict=True):
            assert list(score.token_ids) == token_ids
            assert list(score.logprobs) == [-token_id / 8 for token_id in token_ids]
            assert score.logprob == sum(score.logprobs)
            # In the fake scheduler's logprobs each token is its own likeliest.
            assert score.is_greedy
        total = sum(len(submit.prompt_token_ids) for submit in submits)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (total, 0)
        assert stack.scheduler.of_kind("cancel") == []


@pytest.mark.asyncio
async def test_bad_scores_name_their_fields(prepared: PreparedModel) -> None:
    """Every bad continuation is named; what does not fit behind the input is refused with the numbers."""
    ids = inference_pb2.TokenIds
    async with running_stack(prepared) as stack:
        score = stack.inference.Score
        error = await refusal_of(score(inference_pb2.ScoreRequest(request_id="x" * 129)))
        assert [each.field for each in error.violations] == ["input", "request_id", "continuations"]
        parts = [
            inference_pb2.Continuation(),
            inference_pb2.Continuation(token_ids=ids(ids=[320])),
            inference_pb2.Continuation(text="fine"),
        ]
        error = await refusal_of(score(inference_pb2.ScoreRequest(text="a", continuations=parts)))
        assert [each.field for each in error.violations] == ["continuations[0]", "continuations[1].token_ids.ids"]
        parts = [inference_pb2.Continuation(text=""), inference_pb2.Continuation(token_ids=ids())]
        error = await refusal_of(score(inference_pb2.ScoreRequest(text="", continuations=parts)))
        assert [each.field for each in error.violations] == ["text", "continuations[0]", "continuations[1]"]
        parts = [inference_pb2.Continuation(token_ids=ids(ids=[5] * count)) for count in (1022, 1023)]
        error = await refusal_of(score(inference_pb2.ScoreRequest(text="a", continuations=parts)))
        assert [each.field for each in error.violations] == ["continuations[1]"]
        assert "1024" in error.message
        error = await refusal_of(score(inference_pb2.ScoreRequest(text="a", continuations=parts[:1] * 129)))
        assert [each.field for each in error.violations] == ["continuations"]


@pytest.mark.asyncio
async def test_a_score_that_fails_leaves_nothing(prepared: PreparedModel) -> None:
    """Where one of several continuations fails, so does the call, and the scheduler is told of the others."""
    scheduler = FakeScheduler(auto=False)
    async with running_stack(prepared, scheduler) as stack:
        parts = [inference_pb2.Continuation(text=text) for text in ("a", "b", "c")]
        call = stack.inference.Score(inference_pb2.ScoreRequest(text="x", continuations=parts), timeout=TIMEOUT)
        task = asyncio.create_task(refusal_of(call))
        submits = await scheduler.wait_received("submit", 3)
        failure = scheduler_pb2.RequestError(code=14, reason="AWAY", message="it is away")
        scheduler.sequence += 1
        scheduler.send(
            finished=scheduler_pb2.Finished(sequence=scheduler.sequence, request=submits[1].request, error=failure)
        )
        assert (await task).reason == "AWAY"
        cancels = await scheduler.wait_received("cancel", 2)
        assert {cancel.request for cancel in cancels} == {submits[0].request, submits[2].request}
        call = stack.inference.Score(inference_pb2.ScoreRequest(text="x", continuations=parts), timeout=0.2)
        assert (await refusal_of(call)).code is grpc.StatusCode.DEADLINE_EXCEEDED
        await scheduler.wait_received("cancel", 5)


@pytest.mark.asyncio
async def test_tokens_are_counted(prepared: PreparedModel) -> None:
    """CountTokens gives the number that Tokenize gives ids, and the room that the cell has now."""
    message = inference_pb2.ChatMessage(role=inference_pb2.CHAT_ROLE_USER, content="hi")
    chat = inference_pb2.ChatInput(messages=[message])
    async with running_stack(prepared) as stack:
        for given in ({"text": TEXT}, {"text": ""}, {"chat": chat}):
            tokens = await stack.inference.Tokenize(inference_pb2.TokenizeRequest(**given))
            count = await stack.inference.CountTokens(inference_pb2.CountTokensRequest(**given))
            assert (count.tokens, count.max_model_len) == (len(tokens.token_ids), MAX_MODEL_LEN)
        error = await refusal_of(stack.inference.CountTokens(inference_pb2.CountTokensRequest()))
        assert [each.field for each in error.violations] == ["input"]
        stack.scheduler.send_pools([])
        await stack.wait_health(False)
        count = await stack.inference.CountTokens(inference_pb2.CountTokensRequest(text=TEXT))
        assert (count.tokens, count.max_model_len) == (len(ids_of(TEXT)), 0)
