"""Stop strings over real gRPC: what the client is shown, what the scheduler is told, what is left in the records."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from gateway_fakes import FakeScheduler, Stack, running_stack, text_of, tokens_of
from prepared_samples import MakePrepared
from tokenizer_samples import EOS_ID, byte_level

from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.models.prepared import PreparedModel
from octavo.v1 import inference_pb2

TIMEOUT = 10.0


def ids_of(text: str) -> list[int]:
    """Return the tokens of a text, which are single bytes for most."""
    return list(byte_level().tokenizer.encode(text).ids)


def writes(text: str) -> FakeScheduler:
    """Return a scheduler whose model writes a text, and EOS."""
    return FakeScheduler(script=lambda submit, choice: [*ids_of(text), EOS_ID])


def inputs() -> dict[str, inference_pb2.GenerateRequest]:
    """Return a request of every kind of input."""
    message = inference_pb2.ChatMessage(role=inference_pb2.CHAT_ROLE_USER, content="x")
    return {
        "text": inference_pb2.GenerateRequest(text="x"),
        "token_ids": inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[9])),
        "chat": inference_pb2.GenerateRequest(chat=inference_pb2.ChatInput(messages=[message])),
    }


def request_of(*stop: str, **fields: Any) -> inference_pb2.GenerateRequest:
    """Return a request with stop strings."""
    stopping = inference_pb2.StoppingConfig(stop=stop, **fields.pop("stopping", {}))
    return inference_pb2.GenerateRequest(text="x", stopping=stopping, **fields)


@dataclass
class Result:
    """What became of choice 0."""

    text: str
    token_ids: list[int]
    finished: inference_pb2.ChoiceFinished
    usage: inference_pb2.Usage


async def run(stack: Stack, request: inference_pb2.GenerateRequest, *, unary: bool = False) -> Result:
    """Run a request either way."""
    if unary:
        once = inference_pb2.GenerateOnceRequest(request=request)
        answer = await stack.inference.GenerateOnce(once, timeout=TIMEOUT)
        choice = answer.choices[0]
        return Result(choice.text, list(choice.token_ids), choice.finished, answer.usage)
    events = await stack.generate(request)
    finished = [event.choice_finished for event in events if event.HasField("choice_finished")]
    return Result(text_of(events), tokens_of(events), finished[0], events[-1].usage)


@pytest.mark.asyncio
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("unary", [False, True])
@pytest.mark.parametrize("kind", ["text", "token_ids", "chat"])
async def test_every_path_honours_them(prepared: PreparedModel, kind: str, unary: bool, include: bool) -> None:
    """A4: whatever the input and the rpc, text ends at the stop string, tokens behind it are neither shown nor counted.

    The scheduler is told which tokens count, once; it is the end of the request for it, and no other cancel follows.
    """
    scheduler = writes("so it goes. STOP and more")
    scheduler.auto = False
    async with running_stack(prepared, scheduler) as stack:
        request = inputs()[kind]
        request.stopping.stop.extend(["never", "STOP"])
        request.stopping.include_stop = include
        task = asyncio.create_task(run(stack, request, unary=unary))
        kept = ids_of("so it goes. STOP")
        await scheduler.wait_received("submit")
        scheduler.step(len(kept))
        result = await task
        assert result.text == ("so it goes. STOP" if include else "so it goes. ")
        assert result.token_ids == kept
        assert result.finished.reason == inference_pb2.FINISH_REASON_STOP
        assert result.finished.stop_string == "STOP"
        assert not result.finished.HasField("stop_token_id")
        assert result.finished.completion_tokens == result.usage.completion_tokens == len(kept)
        (cancel,) = await stack.scheduler.wait_received("cancel")
        assert (cancel.choice, cancel.reason) == (0, scheduler_pb2.CANCEL_REASON_STOP)
        assert cancel.HasField("choice")
        assert cancel.kept_tokens == len(kept)
        page = await stack.scrape()
        assert page['octavo_requests_ended_total{model="tiny",outcome="finished",reason="stop"}'] == 1
        assert page['octavo_completion_tokens_total{model="tiny"}'] == len(kept)


@pytest.mark.asyncio
async def test_a_stop_in_the_middle_of_tokens(make_prepared: MakePrepared) -> None:
    """A1: from tokens `ab`, `cd`, `ef` with stop `bcde` nothing but `a` is ever shown, though all three are kept."""
    sample = byte_level()
    pieces = {text: sample.tokenizer.get_vocab_size() + index for index, text in enumerate(("ab", "cd", "ef"))}
    sample.tokenizer.add_tokens(list(pieces))
    prepared = make_prepared(sample=sample)
    script = [*pieces.values(), *ids_of("xyz")]
    async with running_stack(prepared, FakeScheduler(script=lambda submit, choice: script)) as stack:
        result = await run(stack, request_of("bcde"))
        assert (result.text, result.token_ids) == ("a", list(pieces.values()))
        result = await run(stack, request_of("bcde", stopping={"include_stop": True}))
        assert (result.text, result.token_ids) == ("abcde", list(pieces.values()))


@pytest.mark.asyncio
async def test_a_long_stop_holds_nothing_back(prepared: PreparedModel) -> None:
    """A2: with a stop string of 200 characters that the text never begins, every token shows its text at once."""
    scheduler = writes("the cat")
    scheduler.auto = False
    async with running_stack(prepared, scheduler) as stack:
        call = stack.inference.Generate(request_of("z" * 200))
        await scheduler.wait_received("submit")
        async with asyncio.timeout(TIMEOUT):
            assert (await call.read()).HasField("started")
            for token_id in ids_of("the cat"):
                scheduler.step()
                event = await call.read()
                assert list(event.delta.token_ids) == [token_id]
                assert event.delta.text == byte_level().tokenizer.decode([token_id])
        call.cancel()


@pytest.mark.asyncio
async def test_what_was_held_back_comes_at_the_end(prepared: PreparedModel) -> None:
    """Where the output ends inside what may have become a stop string, nothing of it is lost."""
    async with running_stack(prepared, writes("one two thr")) as stack:
        for unary in (False, True):
            result = await run(stack, request_of("three"), unary=unary)
            assert result.text == "one two thr"
            assert result.finished.stop_token_id == EOS_ID
        result = await run(stack, request_of("three", stopping={"max_tokens": 9}))
        assert result.text == "one two thr"[: len(result.text)]
        assert result.finished.reason == inference_pb2.FINISH_REASON_LENGTH
        assert result.text == byte_level().tokenizer.decode(result.token_ids)


@pytest.mark.asyncio
async def test_one_choice_stops_and_the_others_go_on(prepared: PreparedModel) -> None:
    """Late tokens of a stopped choice change nothing; the request ends with its last choice, and its usage is exact."""
    texts = ["a STOP b c d e f", "a b c d e f g h i"]
    scheduler = FakeScheduler(script=lambda submit, choice: [*ids_of(texts[choice]), EOS_ID], auto=False)
    async with running_stack(prepared, scheduler) as stack:
        task = asyncio.create_task(stack.generate(request_of("STOP", n=2)))
        await scheduler.wait_received("submit")
        # All at once: most of choice 0 comes behind its stop string.
        scheduler.step(100)
        events = await task
        assert [text_of(events, choice) for choice in (0, 1)] == ["a ", texts[1]]
        kept = ids_of("a STOP")
        assert tokens_of(events, 0) == kept
        assert events[-1].usage.completion_tokens == len(kept) + len(ids_of(texts[1])) + 1


@pytest.mark.asyncio
async def test_tokens_behind_a_stop_that_are_under_way(prepared: PreparedModel) -> None:
    """Tokens that cross the cancel are dropped, and so is the scheduler's own end of the choice."""
    scheduler = FakeScheduler(
        script=lambda submit, choice: [*ids_of("ab STOP" if not choice else "x" * 30)], auto=False
    )
    async with running_stack(prepared, scheduler) as stack:
        call = stack.inference.Generate(request_of("STOP", n=2))
        (submit,) = await scheduler.wait_received("submit")
        scheduler.step(len(ids_of("ab STOP")) - 1)
        kept = len(ids_of("ab STOP"))
        late = scheduler_pb2.ChoiceOutput(
            request=submit.request, choice=0, first_token_index=kept - 1, token_ids=[ids_of("P")[0], 7, 8]
        )
        scheduler.send_outputs(late)
        await scheduler.wait_received("cancel")
        again = scheduler_pb2.ChoiceOutput(request=submit.request, choice=0, first_token_index=kept + 2, token_ids=[9])
        again.end.reason = scheduler_pb2.FINISH_REASON_LENGTH
        scheduler.send_outputs(again)
        scheduler.step(40)
        async with asyncio.timeout(TIMEOUT):
            events = [event async for event in call]
        assert (text_of(events, 0), len(tokens_of(events, 0))) == ("ab ", kept)
        assert len(tokens_of(events, 1)) == 30


@pytest.mark.asyncio
async def test_a_lost_stop_is_told_again(prepared: PreparedModel) -> None:
    """A choice that was stopped is named again after the next Welcome, or in the Submit."""
    texts = ["ab STOP cd", "x" * 60]
    scheduler = FakeScheduler(script=lambda submit, choice: ids_of(texts[choice]), auto=False)
    async with running_stack(prepared, scheduler) as stack:
        task = asyncio.create_task(stack.generate(request_of("STOP", n=2)))
        await scheduler.wait_received("submit")
        scheduler.step(12)
        await scheduler.wait_received("cancel")
        # The same process, which the cancel did not reach.
        scheduler.end_stream()
        (*_, cancel) = await scheduler.wait_received("cancel", 2)
        assert (cancel.choice, cancel.kept_tokens) == (0, len(ids_of("ab STOP")))
        # Another one, which knows nothing.
        await scheduler.stop()
        scheduler.forget()
        await scheduler.start()
        (*_, submit) = await scheduler.wait_received("submit", 2)
        assert submit.choices[0].end.reason == scheduler_pb2.FINISH_REASON_STOP
        assert list(submit.choices[0].token_ids) == ids_of("ab STOP")
        assert not submit.choices[1].HasField("end")
        scheduler.step(60)
        events = await task
        assert (text_of(events, 0), text_of(events, 1)) == ("ab ", texts[1])


@pytest.mark.asyncio
async def test_min_tokens_comes_first(prepared: PreparedModel) -> None:
    """A stop string that is complete within min_tokens is text; the next one stops."""
    async with running_stack(prepared, writes("a.b.c.d")) as stack:
        result = await run(stack, request_of(".", stopping={"min_tokens": len(ids_of("a."))}))
        assert result.text == "a.b"
        result = await run(stack, request_of(".", stopping={"min_tokens": len(ids_of("a.")) - 1}))
        assert result.text == "a"


@pytest.mark.asyncio
async def test_logprobs_end_with_the_tokens(prepared: PreparedModel) -> None:
    """A stopped choice has one logprob for each of its tokens and none for those behind."""
    scheduler = writes("ab STOP cd ef")
    scheduler.auto = False
    async with running_stack(prepared, scheduler) as stack:
        request = request_of("STOP", output=inference_pb2.OutputConfig(top_logprobs=1))
        task = asyncio.create_task(stack.generate(request))
        await scheduler.wait_received("submit")
        scheduler.step(40)
        events = await task
        logprobs = [each.logprob for event in events for each in event.delta.logprobs]
        assert logprobs == [-token_id / 8 for token_id in ids_of("ab STOP")]


@pytest.mark.asyncio
@pytest.mark.parametrize(("skip", "include"), [(True, True), (False, True), (False, False)])
async def test_the_text_of_a_stop_token(prepared: PreparedModel, skip: bool, include: bool) -> None:
    """include_stop shows the stop token's text, that of a special one only where special tokens are written out."""
    async with running_stack(prepared, writes("a cat")) as stack:
        for stop in ((), ("never",)):
            request = request_of(*stop, stopping={"include_stop": include})
            request.output.skip_special_tokens = skip
            result = await run(stack, request)
            assert result.text == ("a cat</s>" if include and not skip else "a cat")
            word = ids_of("t")[0]
            request.stopping.stop_token_ids.append(word)
            result = await run(stack, request)
            assert result.text == ("a cat" if include else "a ca")
            assert result.finished.stop_token_id == word
