"""The official OpenAI client and LangChain, as their users have them, against a whole cell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from langchain_openai import ChatOpenAI
from openai.types.chat import ChatCompletionMessageParam
from stack import ProcessStack, Stack, in_process, wait_idle, wait_serving
from stack_client import generate, request_for

from octavo.models.prepared import PreparedModel
from octavo.v1 import inference_pb2

QUESTION = "What does the keeper of the lighthouse say?"
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Speak plainly."},
    {"role": "user", "content": QUESTION},
]


def client_of(stack: Stack, api_key: str = "none") -> openai.AsyncOpenAI:
    """The client, straight to the cell whatever proxy the environment names, and without retries of its own."""
    return openai.AsyncOpenAI(
        base_url=f"http://{stack.http_address}/v1",
        api_key=api_key,
        max_retries=0,
        http_client=httpx.AsyncClient(trust_env=False),
    )


@pytest_asyncio.fixture
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of the cell."""
    async with client_of(stack) as each:
        yield each


def chat_request(max_tokens: int, **fields: Any) -> inference_pb2.GenerateRequest:
    """The same conversation over gRPC."""
    request = request_for([], max_tokens, **fields)
    request.chat.messages.add(role=inference_pb2.CHAT_ROLE_SYSTEM, content="Speak plainly.")
    request.chat.messages.add(role=inference_pb2.CHAT_ROLE_USER, content=QUESTION)
    return request


@pytest.mark.asyncio
async def test_a_chat_is_what_grpc_gives(stack: Stack, client: openai.AsyncOpenAI) -> None:
    """Text, end and usage of a greedy chat are those of gRPC; model, id and fingerprint are filled in."""
    wanted = await generate(stack, chat_request(20))
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=20, temperature=0)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", wanted.choices[0].text)
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (wanted.usage.prompt_tokens, 20)
    assert answer.usage.total_tokens == wanted.usage.prompt_tokens + 20
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint == f"fp_{stack.model.revision[:16]}"


@pytest.mark.asyncio
async def test_a_streamed_chat_has_openai_s_order(client: openai.AsyncOpenAI) -> None:
    """Each choice: its role, its text, its end; then the usage alone; joined texts equal the whole answer."""
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 16, "n": 3, "seed": 5}
    whole = await client.chat.completions.create(**asked)
    stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert len({chunk.id for chunk in chunks}) == 1
    *pieces, last = chunks
    assert last.choices == []
    assert (last.usage, whole.usage) != (None, None)
    # The second of equal prompts takes the first one's blocks.
    told = {"exclude": {"prompt_tokens_details"}}
    assert last.usage.model_dump(**told) == whole.usage.model_dump(**told)
    assert all(piece.usage is None for piece in pieces)
    for choice in whole.choices:
        own = [piece.choices[0] for piece in pieces if piece.choices[0].index == choice.index]
        assert (own[0].delta.role, own[0].delta.content) == ("assistant", "")
        assert [each.finish_reason for each in own] == [None] * (len(own) - 1) + [choice.finish_reason]
        assert "".join(each.delta.content or "" for each in own) == choice.message.content


@pytest.mark.asyncio
async def test_completions_of_several_prompts(stack: Stack, client: openai.AsyncOpenAI) -> None:
    """Choices come prompt by prompt, as each prompt alone gives them; texts and token ids are both prompts."""
    prompts = ["the sea and the land", "on the way"]
    answer = await client.completions.create(model="tiny", prompt=prompts, max_tokens=6, n=2, seed=9)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for place, prompt in enumerate(prompts):
        alone = await client.completions.create(model="tiny", prompt=prompt, max_tokens=6, n=2, seed=9)
        own = answer.choices[2 * place : 2 * place + 2]
        assert [choice.text for choice in own] == [choice.text for choice in alone.choices]
        output = await generate(stack, request_for(prompt, 6, n=2, seed=9, sampling=inference_pb2.SamplingConfig()))
        assert [choice.text for choice in own] == [choice.text for choice in output.choices]
    ids = [[5, 6, 7], [8, 9]]
    stream = await client.completions.create(model="tiny", prompt=ids, max_tokens=4, temperature=0, stream=True)
    texts = ["", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [(await generate(stack, request_for(each, 4))).choices[0].text for each in ids]


@pytest.mark.asyncio
async def test_chat_logprobs_are_grpc_s(stack: Stack, client: openai.AsyncOpenAI) -> None:
    """Every token has its logprob and its alternatives, bit for bit; the tokens' bytes make the text."""
    request = chat_request(8)
    request.output.top_logprobs = 3
    wanted = (await generate(stack, request)).choices[0]
    asked: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0, "top_logprobs": 3}
    answer = await client.chat.completions.create(model="tiny", logprobs=True, **asked)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.logprob for entry in logprobs.content] == [row.logprob for row in wanted.logprobs]
    for entry, row in zip(logprobs.content, wanted.logprobs, strict=True):
        assert [each.logprob for each in entry.top_logprobs] == [each.logprob for each in row.top]
    data = bytes(byte for entry in logprobs.content for byte in entry.bytes or ())
    assert data.decode(errors="replace") == answer.choices[0].message.content
    stream = await client.chat.completions.create(model="tiny", logprobs=True, stream=True, **asked)
    parts = [chunk.choices[0].logprobs async for chunk in stream]
    streamed = [entry for part in parts if part is not None for entry in part.content or ()]
    assert streamed == logprobs.content


@pytest.mark.asyncio
@pytest.mark.parametrize("num_top", [0, 1])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
async def test_echo_with_logprobs_covers_the_prompt(client: openai.AsyncOpenAI, num_top: int, max_tokens: int) -> None:
    """Columns have an entry for every token of prompt and output; offsets lead to the tokens' texts; 0 scores only."""
    prompt = "the keeper and the sea"
    answer = await client.completions.create(
        model="tiny", prompt=prompt, max_tokens=max_tokens, temperature=0, echo=True, logprobs=num_top
    )
    (choice,) = answer.choices
    assert answer.usage is not None
    assert answer.usage.completion_tokens == max_tokens
    assert choice.text.startswith(prompt)
    assert max_tokens or choice.text == prompt
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.text_offset is not None
    columns = (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset)
    assert {len(column) for column in columns} == {answer.usage.prompt_tokens + max_tokens}
    assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
    assert all(each < 0 for each in logprobs.token_logprobs[1:])
    for token, logprob, top in list(zip(*columns[:3], strict=True))[1:]:
        assert top[token] >= logprob
        assert 1 <= len(top) <= num_top + 1
    for token, offset in list(zip(logprobs.tokens, logprobs.text_offset, strict=True))[: answer.usage.prompt_tokens]:
        assert prompt[offset:].startswith(token)
    plain = await client.completions.create(model="tiny", prompt=prompt, max_tokens=max_tokens or 1, temperature=0)
    assert max_tokens == 0 or choice.text == prompt + plain.choices[0].text


@pytest.mark.asyncio
async def test_seeds(client: openai.AsyncOpenAI) -> None:
    """One seed repeats, choices differ, a negative seed is one too; a seed that was drawn is told and repeats."""
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "n": 4}

    async def texts(**fields: Any) -> list[str | None]:
        answer = await client.chat.completions.create(**asked, **fields)
        return [choice.message.content for choice in answer.choices]

    seven = await texts(seed=7)
    assert seven == await texts(seed=7)
    assert len(set(seven)) == 4
    assert await texts(seed=-7) == await texts(seed=2**64 - 7) != seven
    drawn = await client.chat.completions.create(**asked)
    told = drawn.octavo["seed"]  # type: ignore[attr-defined]  # Octavo's own field
    assert [choice.message.content for choice in drawn.choices] == await texts(seed=told)


@pytest.mark.asyncio
async def test_stop_strings(client: openai.AsyncOpenAI) -> None:
    """Text ends before the first stop string, or behind it where asked; streams and wholes agree, nothing leaks."""
    asked: dict[str, Any] = {"model": "tiny", "prompt": "the sea", "max_tokens": 40, "temperature": 0}
    plain = (await client.completions.create(**asked)).choices[0].text
    stop = plain[11:14]
    before = plain[: plain.index(stop)]
    for given in (stop, ["never in it", stop]):
        answer = await client.completions.create(**asked, stop=given)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (before, "stop")
        assert answer.choices[0].stop_reason == stop  # type: ignore[attr-defined]  # Octavo's own field
        stream = await client.completions.create(**asked, stop=given, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == before
    included = await client.completions.create(**asked, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert included.choices[0].text == before + stop


@pytest.mark.asyncio
async def test_errors_are_the_client_s_own(client: openai.AsyncOpenAI) -> None:
    """Each kind of error is the class that OpenAI's client has for it, with the field by the name that was sent."""
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError, match="'nobody' is not served here; served: tiny") as missing:
        await create(model="nobody", messages=MESSAGES)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        await create(model="tiny", messages=MESSAGES, temperature=9, top_p=0, max_completion_tokens=0, stop="")
    assert (bad.value.status_code, bad.value.param, bad.value.type) == (400, "temperature", "invalid_request_error")
    for name in ("temperature: must be 0 to 2, is 9", "top_p: ", "stop[0]: "):
        assert name in bad.value.message
    with pytest.raises(openai.BadRequestError, match="tools: is not supported"):
        await create(model="tiny", messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(openai.BadRequestError, match="colour: is no field of this request"):
        await create(model="tiny", messages=MESSAGES, extra_body={"colour": "red"})
    picture: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\].content: part 0 is of type 'image_url'"):
        await create(model="tiny", messages=picture)
    with pytest.raises(openai.BadRequestError, match="best_of") as streamed:
        await create(model="tiny", messages=MESSAGES, stream=True, extra_body={"best_of": 3})
    assert streamed.value.param == "best_of"
    assert [model.id async for model in await client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).id == "tiny"


@pytest.mark.asyncio
async def test_what_is_ignored_is_told(client: openai.AsyncOpenAI) -> None:
    """Hints that change nothing are listed in the answer; defaults that clients send are taken without a word."""
    answer = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "so", "name": "ann"}],
        max_tokens=2,
        metadata={"a": "b"},
        service_tier="auto",
        response_format={"type": "text"},
        store=False,
        tool_choice="none",
        modalities=["text"],
    )
    assert answer.octavo["ignored"] == ["metadata", "service_tier", "messages.name"]  # type: ignore[attr-defined]


@pytest.mark.asyncio
async def test_api_keys_make_tenants(tiny_model: PreparedModel, tmp_path: Path) -> None:
    """With a file of keys a missing or wrong one is 401, of every endpoint but the open ones; a right one serves."""
    keys = tmp_path / "keys"
    keys.write_text("# ours\nann ann-s-secret-key\n")
    async with in_process(tiny_model, flags={"api_keys": str(keys)}) as cell:
        async with client_of(cell, "wrong-key") as client:
            with pytest.raises(openai.AuthenticationError) as refused:
                await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1)
            assert refused.value.code == "invalid_api_key"
            assert refused.value.response.headers["www-authenticate"] == "Bearer"
        async with client_of(cell, "ann-s-secret-key") as client:
            answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1)
            assert answer.choices[0].finish_reason == "length"
        async with httpx.AsyncClient(base_url=f"http://{cell.http_address}", trust_env=False) as bare:
            statuses = {path: (await bare.get(path)).status_code for path in ("/v1/models", "/metrics", "/nowhere")}
            assert set(statuses.values()) == {401}
            for path in ("/health", "/version", "/docs", "/openapi.json"):
                assert (await bare.get(path)).status_code == 200, path
        await wait_idle(cell)


@pytest.mark.asyncio
async def test_langchain(stack: Stack) -> None:
    """LangChain's ChatOpenAI invokes and streams: the same text, with its usage and its reason to end."""
    async with httpx.AsyncClient(trust_env=False) as http:
        model = ChatOpenAI(
            model="tiny",
            base_url=f"http://{stack.http_address}/v1",
            api_key="none",  # type: ignore[arg-type]  # as its own documentation does
            temperature=0,
            max_completion_tokens=12,
            max_retries=0,
            http_async_client=http,
        )
        conversation = [("system", "Speak plainly."), ("human", QUESTION)]
        wanted = await generate(stack, chat_request(12))
        answer = await model.ainvoke(conversation)
        assert answer.content == wanted.choices[0].text
        assert answer.response_metadata["finish_reason"] == "length"
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["input_tokens"] == wanted.usage.prompt_tokens
        chunks = [chunk async for chunk in model.astream(conversation, stream_usage=True)]
        assert "".join(str(chunk.content) for chunk in chunks) == answer.content
        usages = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
        assert [usage["output_tokens"] for usage in usages] == [12]
        several = await model.abatch([conversation, [*conversation, answer, ("human", "And then?")]])
        assert several[0].content == answer.content


def test_the_blocking_client(shared_processes: ProcessStack) -> None:
    """The client without asyncio works as well, whole and streamed."""
    asyncio.run(wait_serving(shared_processes.gateway_address))
    with openai.OpenAI(
        base_url=f"http://{shared_processes.http_address}/v1",
        api_key="none",
        max_retries=0,
        http_client=httpx.Client(trust_env=False),
    ) as client:
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=6, temperature=0)
        stream = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=6, temperature=0, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == answer.choices[0].message.content
