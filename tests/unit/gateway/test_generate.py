"""Generate and GenerateOnce over real gRPC, against a scripted scheduler: what each side is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from gateway_fakes import MAX_MODEL_LEN, FakeScheduler, pool_of, running_stack, text_of, tokens_of
from prepared_samples import MakePrepared
from tokenizer_samples import BOS_ID, END_OF_TURN_ID, EOS_ID, byte_level

from octavo.models.manifest import GenerationConfig
from octavo.models.prepared import PreparedModel
from octavo.v1 import inference_pb2, inference_pb2_grpc

TEXT = "the cat sat 😀 on the mat"


def request_of(text: str = TEXT, **fields: Any) -> inference_pb2.GenerateRequest:
    """Return a request for plain text."""
    return inference_pb2.GenerateRequest(text=text, **fields)


def chat_of(*turns: tuple[int, str]) -> inference_pb2.ChatInput:
    """Return a conversation."""
    return inference_pb2.ChatInput(
        messages=[inference_pb2.ChatMessage(role=role, content=text) for role, text in turns]
    )


@asynccontextmanager
async def narrow_channel(port: int) -> AsyncIterator[grpc.aio.Channel]:
    """Open a channel that takes little beyond what is read."""
    options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield channel


async def once(stack: Any, request: inference_pb2.GenerateRequest) -> inference_pb2.GenerateOnceResponse:
    """Ask for the whole output."""
    response: inference_pb2.GenerateOnceResponse = await stack.inference.GenerateOnce(
        inference_pb2.GenerateOnceRequest(request=request), timeout=10
    )
    return response


@pytest.mark.asyncio
async def test_order_of_events(prepared: PreparedModel) -> None:
    """A stream is Started, then deltas without a gap, one ChoiceFinished, Usage, OK; its text is that of its tokens."""
    async with running_stack(prepared) as stack:
        call = stack.inference.Generate(request_of())
        events = [event async for event in call]
        assert await call.code() is grpc.StatusCode.OK
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds == ["started", *["delta"] * kinds.count("delta"), "choice_finished", "usage"]
        started, finished, usage = events[0].started, events[-2].choice_finished, events[-1].usage
        prompt = byte_level().tokenizer.encode(TEXT).ids
        assert tokens_of(events) == [*prompt, EOS_ID]
        assert text_of(events) == TEXT
        assert (started.model, started.model_revision) == (prepared.name, prepared.revision)
        assert (started.prompt_tokens, started.max_tokens) == (len(prompt), MAX_MODEL_LEN - len(prompt))
        assert finished.reason == inference_pb2.FINISH_REASON_STOP
        assert (finished.stop_token_id, finished.completion_tokens) == (EOS_ID, len(prompt) + 1)
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(prompt) + 1)
        metadata = dict(list(await call.initial_metadata()))
        assert metadata["x-octavo-request-id"] == started.request_id


@pytest.mark.asyncio
async def test_scheduler_gets_the_full_record(make_prepared: MakePrepared) -> None:
    """Submit has nothing unset: the model's defaults and EOS ids, the context as max_tokens, label, trace, deadline."""
    generation = GenerationConfig(
        eos_token_ids=(END_OF_TURN_ID, EOS_ID),
        temperature=0.5,
        top_p=0.75,
        top_k=40,
        min_p=0.25,
        repetition_penalty=1.25,
    )
    prepared = make_prepared(generation=generation)
    async with running_stack(prepared) as stack:
        call = stack.inference.Generate(
            request_of("the", request_id="mine"), timeout=60, metadata=(("traceparent", "00-1-2-01"),)
        )
        assert [event async for event in call]
        (submit,) = stack.scheduler.of_kind("submit")
        sampling, stopping = submit.sampling, submit.stopping
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.75, 40)
        assert (sampling.min_p, sampling.repetition_penalty) == (0.25, 1.25)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0, 0)
        assert not sampling.HasField("top_logprobs")
        assert (stopping.max_tokens, stopping.min_tokens) == (MAX_MODEL_LEN - 1, 0)
        assert list(stopping.stop_token_ids) == [EOS_ID, END_OF_TURN_ID]
        assert (submit.model, submit.model_revision) == (prepared.name, prepared.revision)
        assert (submit.label, submit.traceparent, submit.tenant) == ("mine", "00-1-2-01", "default")
        assert 50 < submit.remaining_deadline.seconds <= 60
        assert submit.age.ToMilliseconds() < 10_000
        assert [len(choice.token_ids) for choice in submit.choices] == [0]


@pytest.mark.asyncio
async def test_client_values_win_over_the_models(prepared: PreparedModel) -> None:
    """Every field that is set is taken, zero included; ignore_eos leaves the client's own stop tokens."""
    request = request_of(
        "the",
        sampling=inference_pb2.SamplingConfig(
            temperature=0, top_p=0.5, top_k=0, min_p=0, repetition_penalty=2, presence_penalty=-2, frequency_penalty=2
        ),
        stopping=inference_pb2.StoppingConfig(max_tokens=3, min_tokens=3, stop_token_ids=[9, 7, 9], ignore_eos=True),
        output=inference_pb2.OutputConfig(top_logprobs=0),
        seed=2**64 - 1,
    )
    async with running_stack(prepared, FakeScheduler(script=lambda submit, choice: [5] * 8)) as stack:
        events = await stack.generate(request)
        assert tokens_of(events) == [5, 5, 5]
        (submit,) = stack.scheduler.of_kind("submit")
        sampling, stopping = submit.sampling, submit.stopping
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 0, 0)
        assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (2, -2, 2)
        assert sampling.HasField("top_logprobs")
        assert (sampling.top_logprobs, sampling.seed) == (0, 2**64 - 1)
        assert (stopping.max_tokens, stopping.min_tokens, list(stopping.stop_token_ids)) == (3, 3, [7, 9])


@pytest.mark.asyncio
@pytest.mark.parametrize("add_bos", [False, True])
async def test_inputs_become_prompts(make_prepared: MakePrepared, add_bos: bool) -> None:
    """Text gets what the tokenizer adds, ids are taken as they are, a chat is rendered with the assistant's cue."""
    sample = byte_level(add_bos=add_bos)
    prepared = make_prepared(sample=sample)
    chat = chat_of((inference_pb2.CHAT_ROLE_SYSTEM, "be brief"), (inference_pb2.CHAT_ROLE_USER, "the cat?"))
    rendered = "<s>system\nbe brief</s><s>user\nthe cat?</s><s>assistant\n"
    async with running_stack(prepared) as stack:
        for request in (
            request_of("the cat"),
            inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5, 319, 5])),
            inference_pb2.GenerateRequest(chat=chat),
        ):
            await stack.generate(request)
        submits = stack.scheduler.of_kind("submit")
        bos = [BOS_ID] if add_bos else []
        assert [list(submit.prompt_token_ids) for submit in submits] == [
            [*bos, *sample.tokenizer.encode("the cat", add_special_tokens=False).ids],
            [5, 319, 5],
            sample.tokenizer.encode(rendered, add_special_tokens=False).ids,
        ]


@pytest.mark.asyncio
async def test_once_equals_the_stream(prepared: PreparedModel) -> None:
    """GenerateOnce gives choice by choice what Generate streams: text, tokens, logprobs, ends, totals."""
    request = request_of(n=3, seed=5, output=inference_pb2.OutputConfig(top_logprobs=2))
    async with running_stack(prepared) as stack:
        events = await stack.generate(request)
        response = await once(stack, request)
        assert [choice.index for choice in response.choices] == [0, 1, 2]
        for choice in response.choices:
            assert choice.text == text_of(events, choice.index)
            assert list(choice.token_ids) == tokens_of(events, choice.index)
            streamed = [each for event in events if event.delta.choice == choice.index for each in event.delta.logprobs]
            assert list(choice.logprobs) == streamed
            ends = [event.choice_finished for event in events if event.HasField("choice_finished")]
            assert choice.finished in ends
        assert response.usage == events[-1].usage
        response.started.request_id = events[0].started.request_id
        assert response.started == events[0].started


@pytest.mark.asyncio
async def test_choices_and_seed(prepared: PreparedModel) -> None:
    """n choices have n indices, each ends once, the seed is echoed and handed on; unset, it is drawn anew (E10)."""
    async with running_stack(prepared) as stack:
        events = await stack.generate(request_of(n=4, seed=7))
        assert events[0].started.seed == 7
        assert stack.scheduler.of_kind("submit")[0].sampling.seed == 7
        assert sorted(event.choice_finished.choice for event in events if event.HasField("choice_finished")) == [
            0,
            1,
            2,
            3,
        ]
        texts = [text_of(events, choice) for choice in range(4)]
        assert len(set(texts)) == 4
        assert [text_of(await stack.generate(request_of(n=4, seed=7)), choice) for choice in range(4)] == texts
        seeds = {(await stack.generate(request_of("a")))[0].started.seed for _ in range(3)}
        assert len(seeds) == 3


@pytest.mark.asyncio
@pytest.mark.parametrize("num_top", [0, 1, 20])
async def test_logprobs(prepared: PreparedModel, num_top: int) -> None:
    """Every token has its own logprob and as many alternatives as were asked for, the cap included (E11)."""
    async with running_stack(prepared) as stack:
        events = await stack.generate(request_of("the mat", output=inference_pb2.OutputConfig(top_logprobs=num_top)))
        logprobs = [each for event in events for each in event.delta.logprobs]
        token_ids = tokens_of(events)
        assert [each.logprob for each in logprobs] == [-token_id / 8 for token_id in token_ids]
        for token_id, row in zip(token_ids, logprobs, strict=True):
            assert [each.token_id for each in row.top] == [token_id + index for index in range(num_top)]
            assert [each.logprob for each in row.top] == [-(index + 1) / 4 for index in range(num_top)]


@pytest.mark.asyncio
async def test_no_logprobs_unless_asked_for(prepared: PreparedModel) -> None:
    """Without top_logprobs no delta has any."""
    async with running_stack(prepared) as stack:
        assert not any(event.delta.logprobs for event in await stack.generate(request_of()))


@pytest.mark.asyncio
async def test_stop_token_is_a_token_but_no_text(prepared: PreparedModel) -> None:
    """A stop token that has text ends the choice, is among its tokens and in the count, and not in the text."""
    stop = byte_level().tokenizer.token_to_id("the")
    script = [*byte_level().tokenizer.encode("a cat.").ids, stop]
    async with running_stack(prepared, FakeScheduler(script=lambda submit, choice: script)) as stack:
        events = await stack.generate(request_of("a", stopping=inference_pb2.StoppingConfig(stop_token_ids=[stop])))
        assert text_of(events) == "a cat."
        assert tokens_of(events) == script
        assert events[-2].choice_finished.stop_token_id == stop
        assert events[-2].choice_finished.completion_tokens == len(script)


@pytest.mark.asyncio
async def test_length_inside_a_character(prepared: PreparedModel) -> None:
    """Where max_tokens cuts a character, its bytes come out at the end, as the whole decoding shows them (A6)."""
    token_ids = byte_level().tokenizer.encode("a€").ids[:-1]
    async with running_stack(prepared, FakeScheduler(script=lambda submit, choice: token_ids)) as stack:
        events = await stack.generate(request_of("a"))
        assert text_of(events) == byte_level().tokenizer.decode(token_ids) == "a\ufffd"
        assert events[-2].choice_finished.reason == inference_pb2.FINISH_REASON_LENGTH


@pytest.mark.asyncio
async def test_prompt_cut_inside_a_character(prepared: PreparedModel) -> None:
    """With token ids that end inside an emoji, no delta has any prompt text, and the emoji is whole (A5)."""
    whole = byte_level().tokenizer.encode("cat 😀 sat").ids
    cut = next(index for index, each in enumerate(whole) if each >= 256 + 3) + 1
    scheduler = FakeScheduler(script=lambda submit, choice: [*whole[cut:], EOS_ID])
    async with running_stack(prepared, scheduler) as stack:
        events = await stack.generate(inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=whole[:cut])))
        assert text_of(events) == "😀 sat"


@pytest.mark.asyncio
async def test_max_tokens_is_clamped_to_the_context(prepared: PreparedModel) -> None:
    """More tokens than the context leaves is no error: Started tells the clamped limit that the scheduler gets."""
    async with running_stack(prepared, max_model_len=16) as stack:
        stopping = inference_pb2.StoppingConfig(max_tokens=1000)
        events = await stack.generate(inference_pb2.GenerateRequest(token_ids={"ids": [5] * 12}, stopping=stopping))
        assert events[0].started.max_tokens == 4
        assert len(tokens_of(events)) == 4
        assert events[-2].choice_finished.reason == inference_pb2.FINISH_REASON_LENGTH


@pytest.mark.asyncio
async def test_two_live_requests_with_one_label(prepared: PreparedModel) -> None:
    """A client's id is a label: two live requests with the same one both complete, each with its own text (E12)."""
    scheduler = FakeScheduler(auto=False)
    async with running_stack(prepared, scheduler) as stack:
        tasks = [
            asyncio.create_task(stack.generate(request_of(text, request_id="same"))) for text in ("a cat", "the mat")
        ]
        submits = await scheduler.wait_received("submit", 2)
        assert {submit.label for submit in submits} == {"same"}
        assert len({submit.request for submit in submits}) == 2
        scheduler.step(30)
        results = await asyncio.gather(*tasks)
        assert [text_of(events) for events in results] == ["a cat", "the mat"]
        assert len({events[0].started.request_id for events in results}) == 2


@pytest.mark.asyncio
async def test_64_streams_at_once(prepared: PreparedModel) -> None:
    """64 streams at once each get exactly their own tokens and text; then nothing is live and no task is left."""
    texts = [f"the cat {index} sat 😀 on {'é' * (index % 5)} mat {index}" for index in range(64)]
    async with running_stack(prepared) as stack:
        results = await asyncio.gather(
            *(stack.generate(request_of(text, n=1 + index % 2)) for index, text in enumerate(texts))
        )
        for text, events in zip(texts, results, strict=True):
            assert text_of(events) == text
            assert tokens_of(events) == [*byte_level().tokenizer.encode(text).ids, EOS_ID]
        await stack.wait_empty()
        assert stack.scheduler.running == {}
        assert stack.scheduler.of_kind("cancel") == []


@pytest.mark.asyncio
async def test_slow_reader_holds_up_nobody(prepared: PreparedModel) -> None:
    """A client that does not read stops neither the scheduler's stream nor the others, and later gets all, once."""
    total = 800
    output = [3 + index % 250 for index in range(total)]
    scheduler = FakeScheduler(script=lambda submit, choice: output, auto=False)
    async with (
        running_stack(prepared, scheduler, max_model_len=2000) as stack,
        narrow_channel(stack.gateway.port) as narrow,
    ):
        # Alternatives make the stream far larger than what its transport takes without a reader.
        request = request_of("a", output=inference_pb2.OutputConfig(top_logprobs=20))
        slow = inference_pb2_grpc.InferenceServiceStub(narrow).Generate(request)
        await scheduler.wait_received("submit")
        scheduler.step(total // 2)
        quick = asyncio.create_task(stack.generate(request_of("a")))
        await scheduler.wait_received("submit", 2)
        scheduler.step(total)
        assert len(tokens_of(await quick)) == total
        # The scheduler is done with both, and all it sent was taken.
        await scheduler.wait_until(lambda: scheduler.acknowledged == scheduler.sequence)
        assert scheduler.running == {}
        assert len(stack.gateway.live) == 1
        events = [event async for event in slow]
        assert tokens_of(events) == output
        assert [each.logprob for event in events for each in event.delta.logprobs] == [-each / 8 for each in output]
        # What could not be written one by one came together.
        assert sum(event.HasField("delta") for event in events) < total


@pytest.mark.asyncio
async def test_five_mebibytes_of_token_ids(make_prepared: MakePrepared) -> None:
    """Token ids of 5 MiB arrive at the scheduler where the model takes them; else the error has the numbers (E16)."""
    count = 5 * 1024 * 1024 // 2
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[200] * count), stopping=inference_pb2.StoppingConfig(max_tokens=1)
    )
    assert request.ByteSize() > 5 * 1024 * 1024
    prepared = make_prepared(max_position_embeddings=4_000_000)
    async with running_stack(prepared, max_model_len=4_000_000) as stack:
        events = await stack.generate(request)
        assert tokens_of(events) == [200]
        assert len(stack.scheduler.of_kind("submit")[0].prompt_token_ids) == count
        stack.scheduler.send_pools([pool_of(prepared)])
        await stack.wait_health(True)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stack.generate(request)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"has {count} tokens; the model takes {MAX_MODEL_LEN}" in str(raised.value.details())
