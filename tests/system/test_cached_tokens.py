"""What clients learn of the prefix cache of a whole cell: how much it had, and that it changes no output."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import grpc.aio
import httpx
import pytest
from metrics_page import scrape
from stack import TIMEOUT, Stack, in_process, wait_idle
from stack_client import generate, read_stream, request_for

from octavo.models.prepared import PreparedModel
from octavo.rpc.channel import open_channel
from octavo.v1 import inference_pb2, inference_pb2_grpc

BLOCK = 16
KEYS = {"alice": "sk-0123456789", "bob": "sk-abcdefghij"}


def new_prompt(length: int) -> list[int]:
    """Return a prompt that no other test has sent."""
    draw = random.SystemRandom()
    return [draw.randrange(3, 270) for _ in range(length)]


def with_cache(prompt: list[int], **cache: object) -> inference_pb2.GenerateRequest:
    """Return a greedy request with this CacheConfig."""
    request = request_for(prompt, 12, ignore_eos=True)
    request.cache.CopyFrom(inference_pb2.CacheConfig(**cache))  # type: ignore[arg-type]
    return request


@pytest.mark.asyncio
async def test_a_prompt_is_cached_the_second_time(stack: Stack) -> None:
    """Cold and warm output are equal token for token, and the whole blocks before the last token were not computed."""
    prompt = new_prompt(4 * BLOCK)
    cold = await generate(stack, request_for(prompt, 12, ignore_eos=True))
    await wait_idle(stack)
    warm = await generate(stack, request_for(prompt, 12, ignore_eos=True))
    assert (cold.started.cached_tokens, cold.usage.cached_tokens) == (0, 0)
    # Of a prompt that is cached to its end the last token is computed all the same.
    assert warm.started.cached_tokens == warm.usage.cached_tokens == 3 * BLOCK
    assert warm.choices[0].token_ids == cold.choices[0].token_ids
    longer = await generate(stack, request_for([*prompt, *new_prompt(5)], 12, n=3))
    assert longer.usage.cached_tokens == 4 * BLOCK


async def prefix_tokens(stack: Stack) -> tuple[float, float]:
    """Return the cell's counters: tokens that the prefix cache was asked for, and those that it had."""
    page = await scrape(int(stack.metrics_address("scheduler").rpartition(":")[2]))
    query, hit = (page[f"octavo_prefix_{kind}_tokens_total"] for kind in ("query", "hit"))
    return query, hit


@pytest.mark.asyncio
async def test_d6_cold_warm_and_in_a_batch_of_seven(stack: Stack) -> None:
    """D6: greedy output is the same cold, warm, and warm among seven at once; the hit counter moves by what was cached.

    Of the seven three are the prompt itself, and four begin as it does and go on elsewhere.
    """
    prompt = new_prompt(5 * BLOCK + 7)
    others = [[*prompt[: 2 * BLOCK], *new_prompt(length)] for length in (1, 9, BLOCK, 3 * BLOCK)]
    alone = [(await generate(stack, with_cache(other, bypass=True))).choices[0].token_ids for other in others]
    await wait_idle(stack)
    query, hit = await prefix_tokens(stack)

    cold = await generate(stack, request_for(prompt, 12, ignore_eos=True))
    await wait_idle(stack)
    assert await prefix_tokens(stack) == (query + len(prompt), hit)

    warm = await generate(stack, request_for(prompt, 12, ignore_eos=True))
    await wait_idle(stack)
    assert await prefix_tokens(stack) == (query + 2 * len(prompt), hit + 5 * BLOCK)

    seven = [prompt, *others[:2], prompt, *others[2:], prompt]
    outputs = await asyncio.gather(*(generate(stack, request_for(each, 12, ignore_eos=True)) for each in seven))
    await wait_idle(stack)
    expected = (query + 2 * len(prompt) + sum(map(len, seven)), hit + 5 * BLOCK + 3 * 5 * BLOCK + 4 * 2 * BLOCK)
    assert await prefix_tokens(stack) == expected
    assert len(cold.choices[0].token_ids) == 12
    assert warm.choices[0].token_ids == cold.choices[0].token_ids
    for each, output in zip(seven, outputs, strict=True):
        wanted = cold.choices[0].token_ids if each is prompt else alone[others.index(each)]
        assert output.choices[0].token_ids == wanted


@pytest.mark.asyncio
async def test_b9_a_cancelled_answer_leaves_its_prefix(stack: Stack) -> None:
    """B9: an answer cancelled halfway, sent again with more behind it, finds its prompt and its whole blocks cached."""
    prompt = new_prompt(2 * BLOCK)
    request = request_for(prompt, 200, ignore_eos=True)
    written: list[int] = []
    async with asyncio.timeout(TIMEOUT), open_channel(stack.gateway_address) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)
        async for response in call:
            written += response.delta.token_ids
            if len(written) > 2 * BLOCK:
                break
        call.cancel()
    await wait_idle(stack)
    again = await generate(stack, request_for([*prompt, *written, 7], 4))
    assert again.usage.cached_tokens >= 4 * BLOCK


@pytest.mark.asyncio
async def test_salt_and_bypass(stack: Stack) -> None:
    """Requests share with those of their own salt alone; one that bypasses takes nothing and leaves nothing."""
    prompt = new_prompt(3 * BLOCK + 1)

    async def cached(**cache: object) -> int:
        output = await generate(stack, with_cache(prompt, **cache))
        await wait_idle(stack)
        return output.usage.cached_tokens

    assert await cached(bypass=True) == 0
    assert await cached() == 0
    assert await cached() == 3 * BLOCK
    assert await cached(bypass=True) == 0
    assert await cached(salt="a") == 0
    assert await cached(salt="b") == 0
    assert await cached(salt="a") == 3 * BLOCK
    assert await cached(salt="a", bypass=True) == 0


@pytest.mark.asyncio
async def test_cached_tokens_over_http(stack: Stack) -> None:
    """OpenAI's field says the same as gRPC's, whichever way the prefix came into the cache."""
    prompt = new_prompt(2 * BLOCK + 3)
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
    async with httpx.AsyncClient(base_url=f"http://{stack.http_address}", trust_env=False, timeout=TIMEOUT) as http:
        await generate(stack, request_for(prompt, 4))
        await wait_idle(stack)
        for given, cached in ((body, 2 * BLOCK), ({**body, "bypass_cache": True}, 0), ({**body, "cache_salt": "x"}, 0)):
            answer = await http.post("/v1/completions", json=given)
            assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}


@pytest.mark.asyncio
async def test_prompt_logprobs_are_computed(stack: Stack) -> None:
    """E8: logprobs of a prompt that is cached are those of one that is not."""
    prompt = new_prompt(2 * BLOCK + 5)
    request = request_for(prompt, 2)
    request.output.prompt_logprobs = 2
    cold = await generate(stack, request)
    await wait_idle(stack)
    warm = await generate(stack, request)
    assert len(warm.prompt.logprobs) == len(prompt)
    assert warm.prompt == cold.prompt
    assert warm.usage.cached_tokens == 0


@pytest.mark.asyncio
async def test_continuations_share_their_input(stack: Stack) -> None:
    """Score computes an input once for all its continuations, and each score is what it is where nothing is cached."""
    prompt = new_prompt(6 * BLOCK)
    continuations = [new_prompt(length) for length in (1, 2, 5, BLOCK, 2 * BLOCK + 1, 3, 1, 7)]

    def request_of(parts: list[list[int]]) -> inference_pb2.ScoreRequest:
        ids = inference_pb2.TokenIds
        return inference_pb2.ScoreRequest(
            token_ids=ids(ids=prompt),
            continuations=[inference_pb2.Continuation(token_ids=ids(ids=part)) for part in parts],
        )

    async with open_channel(stack.gateway_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        together = await stub.Score(request_of(continuations), timeout=TIMEOUT)
        # The last token of the input is computed for each: the first logprob comes of it.
        assert together.usage.cached_tokens == (len(continuations) - 1) * 5 * BLOCK
        await wait_idle(stack)
        for part, score in zip(continuations, together.scores, strict=True):
            request = with_cache([*prompt, *part], bypass=True)
            request.stopping.max_tokens = 0
            request.output.prompt_logprobs = 1
            computed = (await generate(stack, request)).prompt.logprobs[len(prompt) :]
            assert list(score.logprobs) == pytest.approx([each.logprob for each in computed], abs=1e-4)
            assert list(score.token_ids) == part
            again = await stub.Score(request_of([part]), timeout=TIMEOUT)
            assert again.usage.cached_tokens == 5 * BLOCK
            assert list(again.scores[0].logprobs) == pytest.approx(list(score.logprobs), abs=1e-4)
            await wait_idle(stack)


@pytest.mark.asyncio
async def test_no_salt_reads_another_tenant(tiny_model: PreparedModel, tmp_path: Path) -> None:
    """D1: whatever one tenant puts into its salt, the other's cached prefix is not found with it."""
    file = tmp_path / "keys"
    file.write_text("".join(f"{tenant} {key}\n" for tenant, key in KEYS.items()), encoding="utf-8")
    prompt = new_prompt(2 * BLOCK + 1)
    async with in_process(tiny_model, flags={"api_keys": str(file)}) as cell:

        async def cached(channel: grpc.aio.Channel, tenant: str, salt: str) -> int:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            metadata = (("authorization", f"Bearer {KEYS[tenant]}"),)
            output = await read_stream(stub.Generate(with_cache(prompt, salt=salt), metadata=metadata))
            await wait_idle(cell)
            return output.usage.cached_tokens

        async with asyncio.timeout(2 * TIMEOUT), open_channel(cell.gateway_address) as channel:
            for salt in ("", "secret"):
                assert await cached(channel, "alice", salt) == 0
                assert await cached(channel, "alice", salt) == 2 * BLOCK
            for salt in ("", "alice", "secret", "alicesecret", "alice\0secret", "\0", "secret\0alice"):
                assert await cached(channel, "bob", salt) == 0
            assert await cached(channel, "bob", "secret") == 2 * BLOCK
