"""The HTTP API of a whole cell, to the byte: framing, disconnects, deadlines, and that it gives what gRPC gives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import pytest_asyncio
from stack import TIMEOUT, InProcessStack, Stack, get_load, in_process, wait_idle
from stack_client import Output, generate, request_for

from octavo.models.prepared import PreparedModel
from octavo.rpc.channel import open_channel
from octavo.v1 import inference_pb2, inference_pb2_grpc

PROMPT = "the keeper of the lighthouse and the sea"


def http_to(stack: Stack) -> httpx.AsyncClient:
    """A plain HTTP client, straight to the cell."""
    return httpx.AsyncClient(base_url=f"http://{stack.http_address}", trust_env=False, timeout=TIMEOUT)


@pytest_asyncio.fixture
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    """A plain HTTP client of the cell."""
    async with http_to(stack) as client:
        yield client


async def complete(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """Ask for a completion and return the answer."""
    response = await http.post("/v1/completions", json={"prompt": PROMPT, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


SAMPLING = inference_pb2.SamplingConfig
LOGIT_BIAS = [inference_pb2.LogitBias(token_id=100, bias=30), inference_pb2.LogitBias(token_id=7, bias=-100)]
LIKELY_END = inference_pb2.LogitBias(token_id=2, bias=100)
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "sampled": ({"temperature": 0.7, "seed": 3}, {"sampling": SAMPLING(temperature=0.7), "seed": 3}),
    "top_p": ({"temperature": 1, "seed": 3, "top_p": 0.3}, {"sampling": SAMPLING(temperature=1, top_p=0.3), "seed": 3}),
    "top_k": ({"temperature": 1, "seed": 3, "top_k": 4}, {"sampling": SAMPLING(temperature=1, top_k=4), "seed": 3}),
    "min_p": ({"temperature": 1, "seed": 3, "min_p": 0.3}, {"sampling": SAMPLING(temperature=1, min_p=0.3), "seed": 3}),
    "typical_p": (
        {"temperature": 1, "seed": 3, "typical_p": 0.3},
        {"sampling": SAMPLING(temperature=1, typical_p=0.3), "seed": 3},
    ),
    "repetition_penalty": ({"repetition_penalty": 1.7}, {"sampling": SAMPLING(temperature=0, repetition_penalty=1.7)}),
    "presence_penalty": ({"presence_penalty": -1.5}, {"sampling": SAMPLING(temperature=0, presence_penalty=-1.5)}),
    "frequency_penalty": ({"frequency_penalty": -1.9}, {"sampling": SAMPLING(temperature=0, frequency_penalty=-1.9)}),
    "logit_bias": (
        {"logit_bias": {"100": 30, "7": -100}},
        {"sampling": SAMPLING(temperature=0, logit_bias=LOGIT_BIAS)},
    ),
    "bad_words": ({"bad_words": ["\n", "F"]}, {"sampling": SAMPLING(temperature=0, bad_words=["\n", "F"])}),
    "n": ({"temperature": 1, "n": 3, "seed": 4}, {"sampling": SAMPLING(temperature=1), "n": 3, "seed": 4}),
    "stop_token_ids": ({"stop_token_ids": [*range(100, 164)]}, {"stop_token_ids": [*range(100, 164)]}),
    "min_tokens": (
        {"stop_token_ids": [*range(100, 164)], "min_tokens": 5},
        {"stop_token_ids": [*range(100, 164)], "min_tokens": 5},
    ),
    "ignore_eos": (
        {"logit_bias": {"2": 100}, "ignore_eos": True},
        {"sampling": SAMPLING(temperature=0, logit_bias=[LIKELY_END]), "ignore_eos": True},
    ),
    "eos": ({"logit_bias": {"2": 100}}, {"sampling": SAMPLING(temperature=0, logit_bias=[LIKELY_END])}),
    "include_stop": (
        {"stop_token_ids": [*range(100, 164)], "include_stop_str_in_output": True},
        {"stop_token_ids": [*range(100, 164)], "include_stop": True},
    ),
}


@pytest.mark.asyncio
async def test_every_option_is_grpc_s(tiny_model: PreparedModel) -> None:
    """An option by its HTTP name does what it does by its gRPC name: same texts, ends, counts and logprobs."""
    async with in_process(tiny_model) as cell, http_to(cell) as http:
        seen: dict[str, str] = {}
        for name, (fields, options) in SAME.items():
            answer = await complete(http, max_tokens=16, logprobs=2, **fields)
            request = request_for(PROMPT, 16, **options)
            request.output.top_logprobs = 2
            wanted = await generate(cell, request)
            assert _told(answer) == _wanted(wanted), name
            # An option without effect would give what another gave.
            told = json.dumps(_told(answer))
            assert told not in seen, f"{name} gives what {seen[told]} gave"
            seen[told] = name
        await wait_idle(cell)


def _told(answer: dict[str, Any]) -> list[Any]:
    choices = [(each["text"], each["finish_reason"], each["logprobs"]["token_logprobs"]) for each in answer["choices"]]
    return [choices, answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]]


def _wanted(output: Output) -> list[Any]:
    words = {inference_pb2.FINISH_REASON_STOP: "stop", inference_pb2.FINISH_REASON_LENGTH: "length"}
    choices = [
        (choice.text, words[choice.finished.reason], [row.logprob for row in choice.logprobs])
        for choice in output.choices
        if choice.finished is not None
    ]
    return [choices, output.usage.prompt_tokens, output.usage.completion_tokens]


@pytest.mark.asyncio
async def test_options_that_grpc_tells_otherwise(stack: Stack, http: httpx.AsyncClient) -> None:
    """best_of returns the likeliest of what n would; truncation keeps the end; special tokens can be written out."""
    asked = {"max_tokens": 8, "temperature": 1, "seed": 11, "logprobs": 0}
    every = (await complete(http, n=5, **asked))["choices"]
    every.sort(key=lambda each: -sum(each["logprobs"]["token_logprobs"]) / len(each["logprobs"]["token_logprobs"]))
    best = await complete(http, n=2, best_of=5, **asked)
    assert [each["text"] for each in best["choices"]] == [each["text"] for each in every[:2]]
    assert best["usage"]["completion_tokens"] == 40
    cut = await complete(http, truncate_prompt_tokens=3, max_tokens=0, echo=True)
    assert cut["usage"]["prompt_tokens"] == 3
    text = cut["choices"][0]["text"]
    assert text
    assert PROMPT.endswith(text)
    assert text != PROMPT
    forced = {"logit_bias": {"2": 100}, "max_tokens": 2, "ignore_eos": True}
    assert (await complete(http, **forced))["choices"][0]["text"] == ""
    shown = await complete(http, **forced, skip_special_tokens=False)
    assert shown["choices"][0]["text"] == "<|im_end|>" * 2


@pytest.mark.asyncio
async def test_prompt_logprobs_are_grpc_s(stack: Stack, http: httpx.AsyncClient) -> None:
    """A chat tells the logprobs of its prompt's tokens and its text, whole and streamed, as gRPC's Prompt does."""
    asked = {"messages": [{"role": "user", "content": "so"}], "max_tokens": 0, "prompt_logprobs": 2, "echo": True}
    choice = (await http.post("/v1/chat/completions", json=asked)).json()["choices"][0]
    request = request_for([], 0)
    request.chat.messages.add(role=inference_pb2.CHAT_ROLE_USER, content="so")
    request.output.prompt_logprobs, request.output.echo = 2, True
    async with open_channel(stack.gateway_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        wanted = (await stub.GenerateOnce(inference_pb2.GenerateOnceRequest(request=request))).prompt
    assert choice["prompt_text"] == wanted.text
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert [each["logprob"] for each in rest] == [each.logprob for each in wanted.logprobs[1:]]
    assert [[top["logprob"] for top in each["top_logprobs"]] for each in rest] == [
        [top.logprob for top in each.top] for each in wanted.logprobs[1:]
    ]
    pieces = [each["choices"][0] for each in await events_of(http, "/v1/chat/completions", {**asked, "stream": True})]
    assert "".join(each.get("prompt_text", "") for each in pieces) == wanted.text
    assert [row for each in pieces for row in each.get("prompt_logprobs", ())] == choice["prompt_logprobs"]


@pytest.mark.asyncio
async def test_continuing_the_final_message(http: httpx.AsyncClient) -> None:
    """The assistant's last message goes on: the prompt ends with it, and no new turn begins."""
    messages = [{"role": "user", "content": "so"}, {"role": "assistant", "content": "the sea"}]
    asked = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    tokens = (await http.post("/tokenize", json=asked)).json()
    text = (await http.post("/detokenize", json={"tokens": tokens["tokens"], "skip_special_tokens": False})).json()
    assert text["prompt"].endswith("<|im_start|>assistant\nthe sea")
    answer = (await http.post("/v1/chat/completions", json={**asked, "max_tokens": 5, "temperature": 0})).json()
    assert answer["usage"]["prompt_tokens"] == tokens["count"]
    same = await complete(http, prompt=tokens["tokens"], max_tokens=5)
    assert answer["choices"][0]["message"]["content"] == same["choices"][0]["text"]


async def events_of(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the events of a stream, less [DONE], which must be the last."""
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    *payloads, done = [each.removeprefix("data: ") for each in response.text.removesuffix("\n\n").split("\n\n")]
    assert done == "[DONE]"
    return [json.loads(payload) for payload in payloads]


@pytest.mark.asyncio
async def test_the_bytes_of_a_stream(http: httpx.AsyncClient) -> None:
    """Each event is one `data: ` line of JSON and an empty line, sent as it happens, in UTF-8; [DONE] ends it."""
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "stream": True, "logit_bias": {"100": 5}}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-request-id"]
        chunks = [chunk async for chunk in response.aiter_raw()]
    assert len(chunks) > 4, "the output came in one piece"
    data = b"".join(chunks)
    assert data.endswith(b"\n\ndata: [DONE]\n\n")
    events = data.decode().removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    pieces = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-1]]
    whole = await complete(http, max_tokens=24, logit_bias={"100": 5})
    assert "".join(piece["text"] for piece in pieces) == whole["choices"][0]["text"]
    assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert all(piece["text"] for piece in pieces[1:-1]), "a piece that says nothing"


@pytest.mark.asyncio
@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_leaves_frees_everything(stack: Stack, streaming: bool) -> None:
    """Requests whose connections are closed, running and waiting ones, end at once and hold no block."""
    body = {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True, "stream": streaming, "n": 4}
    steps = (await get_load(stack)).executors[0].num_steps
    async with http_to(stack) as http:
        tasks = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(4)]
        async with asyncio.timeout(TIMEOUT):
            while not (load := await get_load(stack)).num_running or load.num_requests < 4:
                await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    load = await wait_idle(stack)
    # To the end it would have been a step for each token.
    assert load.executors[0].num_steps - steps < 1500


@pytest.mark.asyncio
async def test_a_deadline_of_the_client_s(stack: Stack, http: httpx.AsyncClient) -> None:
    """X-Request-Timeout ends a request with 504, a stream with an error event and no [DONE]; nonsense is refused."""
    body = {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True}
    short = {"X-Request-Timeout": "0.3"}
    late = await http.post("/v1/completions", json=body, headers=short)
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline")
    # On a machine with other work a stream needs longer to begin.
    for seconds in ("0.3", "1", "3", "10"):
        given = {"X-Request-Timeout": seconds}
        stream = await http.post("/v1/completions", json={**body, "stream": True}, headers=given)
        if stream.status_code == 200:
            break
    assert stream.status_code == 200
    *_, last = stream.text.removesuffix("\n\n").split("\n\n")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("timeout_error", "deadline")
    assert "[DONE]" not in stream.text
    await wait_idle(stack)
    for text in ("0", "-1", "soon", "nan", "inf"):
        refused = await http.post("/v1/completions", json=body, headers={"X-Request-Timeout": text})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-Request-Timeout")


@pytest.mark.asyncio
async def test_tokens_are_grpc_s(stack: Stack, http: httpx.AsyncClient) -> None:
    """/tokenize and /detokenize give what Tokenize and Detokenize give, with the model's limit."""
    async with open_channel(stack.gateway_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        wanted = list((await stub.Tokenize(inference_pb2.TokenizeRequest(text=PROMPT))).token_ids)
    told = (await http.post("/tokenize", json={"prompt": PROMPT})).json()
    assert (told["tokens"], told["count"]) == (wanted, len(wanted))
    assert told["max_model_len"] == (await http.get("/v1/models/tiny")).json()["max_model_len"] > 0
    assert (await http.post("/detokenize", json={"tokens": wanted})).json() == {"prompt": PROMPT}


@asynccontextmanager
async def cell_of(model: PreparedModel, **flags: str) -> AsyncIterator[tuple[InProcessStack, httpx.AsyncClient]]:
    """A cell of its own, and a client."""
    async with in_process(model, flags=flags) as cell, http_to(cell) as http:
        yield cell, http


@pytest.mark.asyncio
async def test_aliases(tiny_model: PreparedModel) -> None:
    """A further name is as good as the model's own, on both fronts; the answer says the name that was asked for."""
    async with cell_of(tiny_model, served_model_name="gpt-4o,my/model") as (cell, http):
        listed = (await http.get("/v1/models")).json()["data"]
        assert [(each["id"], each["root"]) for each in listed] == [
            ("tiny", "tiny"),
            ("gpt-4o", "tiny"),
            ("my/model", "tiny"),
        ]
        assert (await http.get("/v1/models/my/model")).json()["id"] == "my/model"
        assert (await complete(http, model="gpt-4o", max_tokens=1))["model"] == "gpt-4o"
        request = request_for(PROMPT, 1)
        request.model = "my/model"
        assert (await generate(cell, request)).started.model == "tiny"
        await wait_idle(cell)


@pytest.mark.asyncio
async def test_cors(tiny_model: PreparedModel) -> None:
    """Pages of the origins that are named may ask, without a key in the preflight; others get no permission."""
    async with cell_of(tiny_model, cors_origins="https://chat.example") as (_, http):
        ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        good = await http.options("/v1/chat/completions", headers={"origin": "https://chat.example", **ask})
        assert good.status_code == 200
        assert good.headers["access-control-allow-origin"] == "https://chat.example"
        bad = await http.options("/v1/chat/completions", headers={"origin": "https://other.example", **ask})
        assert "access-control-allow-origin" not in bad.headers
        answer = await http.get("/v1/models", headers={"origin": "https://chat.example"})
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        shown = answer.headers["access-control-expose-headers"].split(", ")
        assert shown == ["x-request-id", "retry-after", "retry-after-ms"], "what OpenAI's client reads in a page"
