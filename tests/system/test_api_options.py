"""Every option of the text API from end to end, against what transformers and the plain output say."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
from metrics_page import scrape
from reference import Reference
from stack import TIMEOUT, InProcessStack, get_load, in_process, wait_idle
from stack_client import Output, generate, generate_all, request_for

from octavo.models.prepared import PreparedModel
from octavo.rpc.channel import open_channel
from octavo.rpc.errors import from_rpc_error
from octavo.v1 import inference_pb2, inference_pb2_grpc

PROMPT = [40, 41, 42, 43, 44, 45]
# In this order the byte-level alphabet of the tiny models' tokenizer begins, with "!" at 3.
LETTER_IDS = [3 + ord(letter) - ord("!") for letter in "abcdefghijklmnopqrstuvwxyz"]
SAMPLED = inference_pb2.SamplingConfig(temperature=1.2)


@pytest_asyncio.fixture
async def cell(tiny_model: PreparedModel) -> AsyncIterator[InProcessStack]:
    """A cell in this process, idle again when the test is done."""
    async with in_process(tiny_model) as stack:
        yield stack
        load = await wait_idle(stack)
        assert load.num_desyncs == 0


async def call(stack: InProcessStack, method: str, request: Any) -> Any:
    """Make a unary call."""
    async with asyncio.timeout(TIMEOUT), open_channel(stack.gateway_address) as channel:
        return await getattr(inference_pb2_grpc.InferenceServiceStub(channel), method)(request)


async def once(stack: InProcessStack, request: inference_pb2.GenerateRequest) -> inference_pb2.GenerateOnceResponse:
    """Ask for the whole output."""
    response: inference_pb2.GenerateOnceResponse = await call(
        stack, "GenerateOnce", inference_pb2.GenerateOnceRequest(request=request)
    )
    return response


def inputs() -> dict[str, inference_pb2.GenerateRequest]:
    """A request of every kind of input, for 40 tokens of plain letters, which a random model alone would not write."""
    sampling = inference_pb2.SamplingConfig(temperature=1)
    sampling.logit_bias.extend(inference_pb2.LogitBias(token_id=token_id, bias=100) for token_id in LETTER_IDS)
    requests = {
        "text": request_for("the sea and the land", 40, seed=1, sampling=sampling, ignore_eos=True),
        "token_ids": request_for(PROMPT, 40, seed=2, sampling=sampling, ignore_eos=True),
        "chat": request_for([], 40, seed=3, sampling=sampling, ignore_eos=True),
    }
    requests["chat"].chat.messages.add(role=inference_pb2.CHAT_ROLE_USER, content="the sea")
    return requests


@dataclass
class Free:
    """What a request writes without stop strings: its tokens, and its text after each of them."""

    token_ids: list[int]
    texts: list[str]

    def stopped_by(self, stop: str, *, include: bool) -> tuple[str, list[int]]:
        """Return text and tokens where the first `stop` ends them: the simple definition."""
        whole = self.texts[-1]
        end = whole.index(stop) + len(stop)
        kept = next(index for index, text in enumerate(self.texts) if len(text) >= end) + 1
        return whole[: end if include else end - len(stop)], self.token_ids[:kept]


async def run_free(stack: InProcessStack, request: inference_pb2.GenerateRequest) -> Free:
    """Run a request without stop strings, token by token."""
    free = Free([], [])
    async with asyncio.timeout(TIMEOUT), open_channel(stack.gateway_address) as channel:
        async for event in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request):
            if event.HasField("delta"):
                before = free.texts[-1] if free.texts else ""
                # A delta of several tokens tells nothing of the ones between.
                free.texts += [before] * (len(event.delta.token_ids) - 1) + [before + event.delta.text]
                free.token_ids += event.delta.token_ids
    return free


def a_stop_of(text: str, *, start: int) -> str:
    """Return a part of a text that is there for the first time at `start`, of two characters or more."""
    parts = (text[start : start + length] for length in range(2, len(text) - start))
    return next(part for part in parts if text.index(part) == start)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["text", "token_ids", "chat"])
async def test_stop_strings_on_every_path(cell: InProcessStack, kind: str) -> None:
    """A1 A4: text, tokens and chat, unary and stream, include on and off: the output ends at the stop string."""
    request = inputs()[kind]
    free = await run_free(cell, request)
    text = free.texts[-1]
    assert "\ufffd" not in text
    for start in (0, 7, 20):
        stop = a_stop_of(text, start=start)
        for include in (False, True):
            request.stopping.ClearField("stop")
            request.stopping.stop.extend([stop, "never there"])
            request.stopping.include_stop = include
            wanted_text, wanted_tokens = free.stopped_by(stop, include=include)
            choice = (await generate(cell, request)).choices[0]
            whole = await once(cell, request)
            assert choice.text == whole.choices[0].text == wanted_text
            assert choice.token_ids == list(whole.choices[0].token_ids) == wanted_tokens
            assert choice.finished == whole.choices[0].finished
            assert choice.finished is not None
            assert choice.finished.stop_string == stop
            assert whole.usage.completion_tokens == len(wanted_tokens)


@pytest.mark.asyncio
async def test_a_stopped_request_is_a_finished_one(cell: InProcessStack) -> None:
    """A stop in the text frees the blocks at once; gateway and scheduler count a request that finished well."""
    request = inputs()["token_ids"]
    free = await run_free(cell, request)
    request.stopping.stop.append(free.texts[-1][0])
    request.stopping.max_tokens = 1500
    await generate(cell, request)
    await wait_idle(cell)
    page = await scrape(cell.gateway.metrics_port)
    name = cell.model.name
    assert page[f'octavo_requests_ended_total{{model="{name}",outcome="finished",reason="stop"}}'] == 1
    page = await scrape(cell.scheduler.metrics_port)
    assert page['octavo_scheduler_requests_ended_total{outcome="finished"}'] == 2
    assert page['octavo_scheduler_requests_ended_total{outcome="cancelled"}'] == 0


def check_prompt(prompt: inference_pb2.Prompt, token_ids: Sequence[int], reference: Reference, num_top: int) -> None:
    """The prompt's logprobs are transformers', of every token but the first."""
    assert list(prompt.token_ids) == list(token_ids)
    assert len(prompt.logprobs) == len(token_ids)
    assert not prompt.logprobs[0].HasField("logprob")
    rows = reference.logprobs(token_ids)
    for index in range(1, len(token_ids)):
        told, row = prompt.logprobs[index], rows[index - 1]
        assert told.logprob == pytest.approx(row[token_ids[index]].item(), abs=1e-3)
        assert [top.token_id for top in told.top] == row.topk(num_top).indices.tolist()


@pytest.mark.asyncio
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("num_top", [0, 1])
async def test_prompt_logprobs_are_transformers(
    cell: InProcessStack, reference: Reference, num_top: int, max_tokens: int
) -> None:
    """E4: with any max_tokens, 0 too, echo and prompt logprobs are as long as the prompt, and right."""
    draw = random.Random(num_top)
    # Longer than a step takes, so that most of it is told by steps that sample nothing.
    prompt = [draw.randrange(3, 270) for _ in range(600)]
    request = request_for(prompt, max_tokens, ignore_eos=True, n=2)
    request.output.echo = True
    request.output.prompt_logprobs = num_top
    output = await generate(cell, request)
    check_prompt(output.prompt, prompt, reference, num_top)
    text = await call(cell, "Detokenize", inference_pb2.DetokenizeRequest(token_ids=prompt))
    assert output.prompt.text == text.text
    wanted = reference.greedy(prompt, max_tokens) if max_tokens else []
    assert [choice.token_ids for choice in output.choices] == [wanted] * 2
    whole = await once(cell, request)
    assert whole.prompt.token_ids == output.prompt.token_ids
    assert [choice.finished.reason for choice in whole.choices] == [inference_pb2.FINISH_REASON_LENGTH] * 2


@pytest.mark.asyncio
async def test_scores_are_transformers(cell: InProcessStack, reference: Reference) -> None:
    """A score is the sum of the continuation's logprobs; what greedy generation writes is greedy, another is not."""
    greedy = (await generate(cell, request_for(PROMPT, 6, ignore_eos=True))).choices[0].token_ids
    other = [*greedy[:-1], (greedy[-1] + 1) % 320]
    ids = inference_pb2.TokenIds
    parts = [inference_pb2.Continuation(token_ids=ids(ids=each)) for each in (greedy, other, greedy[:1])]
    request = inference_pb2.ScoreRequest(token_ids=ids(ids=PROMPT), continuations=parts)
    answer = await call(cell, "Score", request)
    assert [score.is_greedy for score in answer.scores] == [True, False, True]
    for score, token_ids in zip(answer.scores, (greedy, other, greedy[:1]), strict=True):
        rows = reference.logprobs([*PROMPT, *token_ids])[len(PROMPT) - 1 : -1]
        wanted = [row[token].item() for row, token in zip(rows, token_ids, strict=True)]
        assert list(score.token_ids) == token_ids
        assert list(score.logprobs) == pytest.approx(wanted, abs=1e-3)
        assert score.logprob == pytest.approx(sum(wanted), abs=1e-2)
    assert answer.usage.prompt_tokens == 3 * len(PROMPT) + len(greedy) + len(other) + 1


@pytest.mark.asyncio
async def test_biases_forbid_and_force(cell: InProcessStack) -> None:
    """E3: -100 takes a token out of the output, 100 forces one; an id that is none is named, and the cell lives on."""
    plain = (await generate(cell, request_for(PROMPT, 20, ignore_eos=True))).choices[0].token_ids
    request = request_for(PROMPT, 20, ignore_eos=True)
    for token_id in set(plain):
        request.sampling.logit_bias.add(token_id=token_id, bias=-100)
    assert not set((await generate(cell, request)).choices[0].token_ids) & set(plain)
    request.sampling.ClearField("logit_bias")
    request.sampling.logit_bias.add(token_id=77, bias=100)
    assert (await generate(cell, request)).choices[0].token_ids == [77] * 20
    request.sampling.logit_bias.add(token_id=320, bias=1)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await generate(cell, request)
    (violation,) = from_rpc_error(raised.value).violations
    assert violation.field == "sampling.logit_bias[1].token_id"
    again = await generate(cell, request_for(PROMPT, 20, ignore_eos=True))
    assert again.choices[0].token_ids == plain


@pytest.mark.asyncio
async def test_bad_words_never_come(cell: InProcessStack) -> None:
    """A word that the output would have is not in it; the rest of the output goes its own way."""
    request = request_for("the sea and the land", 60, ignore_eos=True, n=3, seed=5, sampling=SAMPLED)
    plain = await generate(cell, request)
    counts = {word: sum(choice.text.count(word) for choice in plain.choices) for word in ("e", "a", "th", "in")}
    words = [word for word, count in counts.items() if count]
    assert words
    request.sampling.bad_words.extend(words)
    forbidden: set[int] = set()
    for word in words:
        tokens = await call(cell, "Tokenize", inference_pb2.TokenizeRequest(text=word))
        forbidden |= set(tokens.token_ids) if len(tokens.token_ids) == 1 else set()
    assert forbidden
    output = await generate(cell, request)
    assert not any(set(choice.token_ids) & forbidden for choice in output.choices)


@pytest.mark.asyncio
async def test_the_best_are_those_of_all(cell: InProcessStack) -> None:
    """best_of returns, by mean logprob, the likeliest of the very choices that n gives with the same seed."""
    request = request_for(PROMPT, 12, n=6, seed=9, sampling=SAMPLED, ignore_eos=True)
    request.output.top_logprobs = 0
    every = (await generate(cell, request)).choices
    means = [fmean(each.logprob for each in choice.logprobs) for choice in every]
    best = sorted(range(6), key=lambda index: -means[index])[:2]
    request.n, request.best_of = 2, 6
    request.output.ClearField("top_logprobs")
    answer = await once(cell, request)
    assert [list(choice.token_ids) for choice in answer.choices] == [every[index].token_ids for index in best]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert not any(choice.logprobs for choice in answer.choices)
    assert answer.usage.completion_tokens == 72


@pytest.mark.asyncio
async def test_choices_repeat_and_differ_with_every_option(cell: InProcessStack) -> None:
    """n choices of one seed differ, and repeat with the options on; another seed gives others."""
    requests = [mixed_request(0, seed) for seed in (7, 7, 8)]
    first, again, other = [await generate(cell, request) for request in requests]
    texts = [[choice.text for choice in output.choices] for output in (first, again, other)]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) == len(texts[0]) == 2


@pytest.mark.asyncio
async def test_truncation_and_continuation(cell: InProcessStack) -> None:
    """A truncated input runs on its last tokens; a continued message on the template without its end."""
    plain = await generate(cell, request_for(PROMPT[-3:], 8))
    request = request_for(PROMPT, 8)
    request.truncate_prompt_tokens = 3
    output = await generate(cell, request)
    assert output.choices[0].token_ids == plain.choices[0].token_ids
    assert output.usage.prompt_tokens == 3
    chat = inference_pb2.ChatInput(continue_final_message=True)
    chat.messages.add(role=inference_pb2.CHAT_ROLE_USER, content="hi")
    chat.messages.add(role=inference_pb2.CHAT_ROLE_ASSISTANT, content="the sea")
    tokens = await call(cell, "Tokenize", inference_pb2.TokenizeRequest(chat=chat))
    detokenize = inference_pb2.DetokenizeRequest(token_ids=tokens.token_ids, skip_special_tokens=False)
    text = (await call(cell, "Detokenize", detokenize)).text
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nthe sea"
    count = await call(cell, "CountTokens", inference_pb2.CountTokensRequest(chat=chat))
    assert count.tokens == len(tokens.token_ids)


def mixed_request(index: int, seed: int, length: int = 20) -> inference_pb2.GenerateRequest:
    """A request with most of the options on; which ones beside depends on `index`."""
    draw = random.Random(index)
    prompt = [draw.randrange(3, 270) for _ in range(length)]
    sampling = inference_pb2.SamplingConfig(
        temperature=1.3, typical_p=0.9, top_p=0.95, frequency_penalty=0.3, bad_words=["the", "in"]
    )
    sampling.logit_bias.add(token_id=5 + index, bias=-100)
    sampling.logit_bias.add(token_id=60 + index, bias=2)
    request = request_for(prompt, 50, n=2, seed=seed, sampling=sampling, ignore_eos=True)
    request.stopping.stop.extend(["zq", "e", " a"][: 1 + index % 3])
    request.stopping.include_stop = index % 2 == 0
    request.stopping.min_tokens = 30
    request.output.top_logprobs = index % 3
    request.output.echo = True
    request.output.prompt_logprobs = index % 2
    request.output.skip_special_tokens = index % 2 == 1
    return request


def shown(output: Output) -> list[Any]:
    """What must not depend on company: all but logprobs, whose last bits may."""
    choices = [(choice.text, choice.token_ids, choice.finished) for choice in output.choices]
    return [choices, list(output.prompt.token_ids), output.prompt.text, output.usage]


@pytest.mark.asyncio
async def test_options_do_not_depend_on_company_or_preemption(tiny_model: PreparedModel) -> None:
    """With the options on, each request gives alone at depth 1 what it gives among others in a pool that preempts."""
    requests = [
        mixed_request(index, 100 + index, length) for index, length in enumerate((1, 17, 33, 48, 63, 90, 20, 5))
    ]
    async with in_process(tiny_model, flags={"depth": "1"}) as stack:
        alone = [await generate(stack, request) for request in requests]
    async with in_process(tiny_model, flags={"depth": "3", "kv_memory": str(16 * 6144)}) as stack:
        together = await generate_all(stack, requests)
        load = await get_load(stack)
        assert load.num_preemptions > 0
        assert load.num_desyncs == 0
        await wait_idle(stack)
    assert any(
        choice.finished is not None and choice.finished.stop_string for output in alone for choice in output.choices
    )
    for one, other in zip(alone, together, strict=True):
        assert shown(one) == shown(other)
        assert len(one.prompt.logprobs) == len(other.prompt.logprobs) == len(one.prompt.token_ids)
        for told, again in zip(one.prompt.logprobs, other.prompt.logprobs, strict=True):
            assert told.logprob == pytest.approx(again.logprob, abs=1e-4)
            assert [top.token_id for top in told.top] == [top.token_id for top in again.top]
        for choice, other_choice in zip(one.choices, other.choices, strict=True):
            assert [each.logprob for each in choice.logprobs] == pytest.approx(
                [each.logprob for each in other_choice.logprobs], abs=1e-4
            )
