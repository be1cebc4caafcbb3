"""The HTTP target against a server that sends what real ones send, and what broken ones send."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai_server import DONE, Answer, OpenAiServer, chat_event, event, openai_server, text_event, usage_event

from octavo.bench.http_client import HttpTarget
from octavo.bench.records import BenchError, BenchRequest, Record, RequestFailed
from octavo.bench.sse import SseReader
from octavo.bench.target import GenerationOptions

TIMEOUT = 30.0
WHOLE = [text_event("a"), text_event("b"), text_event("", "length"), usage_event(7, 2), DONE]


@contextlib.asynccontextmanager
async def target_of(
    server: OpenAiServer, *, is_chat: bool = False, ignore_eos: bool = True, timeout: float = TIMEOUT, **more: str
) -> AsyncIterator[HttpTarget]:
    """A target that knows the server's model."""
    options = GenerationOptions(model="m", is_chat=is_chat, ignore_eos=ignore_eos, timeout=timeout)
    target = HttpTarget(server.url, options, time.perf_counter, **more)
    try:
        yield target
    finally:
        await target.close()


async def stream(target: HttpTarget, prompt: str = "hello", max_tokens: int = 2) -> Record:
    """Send one request."""
    record = Record(0, max_tokens, scheduled=0.0, sent=0.0)
    async with asyncio.timeout(TIMEOUT):
        await target.stream(BenchRequest(prompt, max_tokens), record)
    return record


async def failure_of(answer: Answer, **options: float) -> tuple[RequestFailed, Record]:
    """Send one request that must fail; return how, and the record."""
    record = Record(0, 2, scheduled=0.0, sent=0.0)
    async with openai_server(answer) as server, target_of(server, **options) as target:  # type: ignore[arg-type]
        with pytest.raises(RequestFailed) as failed:
            await target.stream(BenchRequest("hello", 2), record)
    return failed.value, record


@given(st.data())
def test_events_are_the_same_however_the_bytes_are_split(data: st.DataObject) -> None:
    """Comments, CR LF, fields of other names, data of several lines, an unfinished tail: any cut gives one result."""
    stream_bytes = (
        b": ping\n\ndata: one\n\nevent: message\nid: 3\ndata: two\r\n\r\n:\ndata:three\n\ndata: a\ndata: b\n\n\n\n"
        b"data: [DONE]\n\ndata: never ended"
    )
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream_bytes)), max_size=12)))
    edges = [0, *cuts, len(stream_bytes)]
    reader = SseReader()
    payloads = [payload for begin, end in pairwise(edges) for payload in reader.feed(stream_bytes[begin:end])]
    assert payloads == [b"one", b"two", b"three", b"a\nb", b"[DONE]"]


@pytest.mark.asyncio
async def test_tokens_are_the_servers_count_and_deliveries_are_stamped() -> None:
    """Comment lines and events without text are no delivery; usage says how many tokens there were."""
    whole = b"".join([b": keep-alive\n\n", *WHOLE])
    pieces = [whole[begin : begin + 7] for begin in range(0, len(whole), 7)]
    async with openai_server(Answer(pieces)) as server, target_of(server) as target:
        record = await stream(target)
    assert len(record.stamps) == 2
    assert record.stamps == sorted(record.stamps)
    assert record.delta_tokens == [1, 1]
    assert (record.prompt_tokens, record.output_tokens, record.is_counted_by_server) == (7, 2, True)


@pytest.mark.asyncio
async def test_a_chats_first_token_is_its_first_text() -> None:
    """The role comes before any token and starts nothing; reasoning and tool calls are tokens as content is."""
    pieces = [
        chat_event(role="assistant", content=""),
        chat_event(reasoning_content="hm"),
        chat_event(content="a"),
        chat_event(tool_calls=[{"index": 0}]),
        chat_event("stop"),
        usage_event(20, 5),
        DONE,
    ]
    async with openai_server(Answer(pieces)) as server, target_of(server, is_chat=True) as target:
        record = await stream(target)
        assert server.requests[0][0] == "POST /v1/chat/completions"
    assert (len(record.stamps), record.output_tokens, record.prompt_tokens) == (3, 5, 20)


@pytest.mark.asyncio
async def test_token_ids_count_where_the_server_sends_them() -> None:
    """An event of three ids is a delivery of three tokens."""
    pieces = [event(choices=[{"text": "abc", "token_ids": [1, 2, 3], "finish_reason": "length"}]), DONE]
    async with openai_server(Answer(pieces)) as server, target_of(server) as target:
        record = await stream(target)
    assert (record.delta_tokens, record.output_tokens) == ([3], 3)


@pytest.mark.asyncio
async def test_without_usage_tokens_are_chunks_and_it_is_noted() -> None:
    """A finish_reason alone ends a stream too; the count is of deliveries and says so."""
    pieces = [text_event("a"), text_event("b"), text_event("c", "stop")]
    async with openai_server(Answer(pieces)) as server, target_of(server) as target:
        record = await stream(target)
    assert (record.output_tokens, record.is_counted_by_server, record.prompt_tokens) == (3, False, None)


@pytest.mark.asyncio
async def test_the_request_asks_for_what_is_measured() -> None:
    """Streaming with usage, the exact length, the key as a bearer, no compression; ignore_eos only if wanted."""
    async with openai_server(Answer(WHOLE)) as server:
        async with target_of(server, api_key="secret") as target:
            await stream(target, "text", 9)
        async with target_of(server, is_chat=True, ignore_eos=False) as target:
            await stream(target, "text", 9)
        first, second = server.bodies
        headers = [each for _, each in server.requests]
    common = {"model": "m", "max_tokens": 9, "temperature": 0.0, "stream": True}
    common |= {"stream_options": {"include_usage": True}}  # type: ignore[dict-item]
    assert first == {**common, "prompt": "text", "ignore_eos": True}
    assert second == {**common, "messages": [{"role": "user", "content": "text"}]}
    assert headers[0]["authorization"] == "Bearer secret"
    assert headers[0]["accept-encoding"] == "identity"
    assert "authorization" not in headers[1]


@pytest.mark.asyncio
async def test_an_error_status_is_counted_by_its_number_and_told_in_the_servers_words() -> None:
    """OpenAI's shape, FastAPI's flat one, and no shape at all."""
    nested = b'{"error": {"message": "slow down", "type": "rate_limit", "code": "rate_limit_exceeded"}}'
    for status, body, code, words in (
        ("429 Too Many Requests", nested, "HTTP_429", "rate_limit_exceeded: slow down"),
        ("400 Bad Request", b'{"message": "too long", "type": "BadRequest"}', "HTTP_400", "BadRequest: too long"),
        ("502 Bad Gateway", b"<html>oops", "HTTP_502", "<html>oops"),
    ):
        failure, record = await failure_of(Answer([body], status, "application/json"))
        assert (failure.status, failure.message) == (code, words)
        assert record.output_tokens == 0


@pytest.mark.asyncio
async def test_an_error_within_the_stream_is_an_error() -> None:
    """Status 200 was sent before it went wrong; what came until then is in the record."""
    pieces = [text_event("a"), event(error={"message": "out of memory", "type": "server_error", "code": None}), DONE]
    failure, record = await failure_of(Answer(pieces))
    assert (failure.status, failure.message) == ("STREAM_ERROR", "server_error: out of memory")
    assert (len(record.stamps), record.output_tokens) == (1, 1)


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (Answer([text_event("a")], is_cut=True), "BROKEN_STREAM"),
        (Answer([text_event("a")]), "BROKEN_STREAM"),
        (Answer([b"data: {not json\n\n"]), "BROKEN_STREAM"),
        (Answer([event(choices=[], usage={"prompt_tokens": 1})]), "BROKEN_STREAM"),
        (Answer([b"data: 17\n\n"]), "BROKEN_STREAM"),
        (Answer([b'{"choices": []}'], content_type="application/json"), "NOT_STREAMED"),
    ],
)
@pytest.mark.asyncio
async def test_a_stream_that_is_not_whole_is_a_failure(answer: Answer, status: str) -> None:
    """Cut within the body, ended without a mark, unreadable, or no stream: never a success with fewer tokens."""
    failure, _ = await failure_of(answer)
    assert failure.status == status


@pytest.mark.asyncio
async def test_a_request_that_takes_too_long_fails_and_is_let_go() -> None:
    """TIMEOUT, and the server sees the client leave."""
    record = Record(0, 2, scheduled=0.0, sent=0.0)
    async with openai_server(Answer([text_event("a")], hangs=True)) as server, target_of(server, timeout=0.2) as target:
        with pytest.raises(RequestFailed) as failed:
            await target.stream(BenchRequest("hello", 2), record)
        assert failed.value.status == "TIMEOUT"
        async with asyncio.timeout(TIMEOUT):
            await server.client_left.wait()


@pytest.mark.asyncio
async def test_cancelling_the_reader_closes_its_connection() -> None:
    """At Ctrl-C a server must not go on writing for nobody."""
    async with openai_server(Answer([text_event("a")], hangs=True)) as server, target_of(server) as target:
        record = Record(0, 2, scheduled=0.0, sent=0.0)
        reading = asyncio.create_task(target.stream(BenchRequest("hello", 2), record))
        async with asyncio.timeout(TIMEOUT):
            while not record.stamps:
                await asyncio.sleep(0.001)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            await server.client_left.wait()


@pytest.mark.asyncio
async def test_nobody_there_is_a_failure_of_the_request_and_an_error_of_the_run() -> None:
    """CONNECT for one request; before a run, a sentence with the URL."""
    async with openai_server() as server:
        url = server.url
    target = HttpTarget(url, GenerationOptions(), time.perf_counter)
    with pytest.raises(RequestFailed) as failed:
        await stream(target)
    assert failed.value.status == "CONNECT"
    with pytest.raises(BenchError, match=f"--url: {url} does not answer"):
        await target.describe()
    await target.close()


@pytest.mark.asyncio
async def test_the_only_model_is_found_and_several_want_a_choice() -> None:
    """The name goes into requests; without a list, or with several, --model is asked for."""
    async with openai_server(Answer(WHOLE)) as server:
        target = HttpTarget(server.url + "/", GenerationOptions(), time.perf_counter)
        info = await target.describe()
        assert (info.protocol, info.model, info.max_model_len, info.address) == ("http", "m", 512, server.url)
        await stream(target)
        assert server.bodies[0]["model"] == "m"
        for body, status, found in (
            (b'{"data": [{"id": "a"}, {"id": "b"}]}', "200 OK", "lists a, b"),
            (b"no", "404 Not Found", r"lists no model \(HTTP 404\)"),
            (b"[]", "200 OK", r"lists no model \(HTTP 200\)"),
        ):
            server.models = Answer([body], status, "application/json")
            fresh = HttpTarget(server.url, GenerationOptions(), time.perf_counter)
            with pytest.raises(BenchError, match=f"--model: .* {found}; name the one"):
                await fresh.describe()
            await fresh.close()
        root = HttpTarget(server.url.removesuffix("/v1"), GenerationOptions(), time.perf_counter)
        with pytest.raises(BenchError, match=r"or --url http://[^ ]*\d/v1, where an OpenAI API has them"):
            await root.describe()
        await root.close()
        named = HttpTarget(server.url, GenerationOptions(model="mine"), time.perf_counter)
        assert (await named.describe()).model == "mine"
        await named.close()
        await target.close()


@pytest.mark.asyncio
async def test_input_tokens_are_asked_of_the_server() -> None:
    """One output token without streaming tells the count; None where it does not; its refusal ends the run."""
    async with openai_server() as server, target_of(server) as target:
        server.answer = Answer([b'{"usage": {"prompt_tokens": 42}}'], content_type="application/json")
        assert await target.count_tokens("some text") == 42
        assert server.bodies[0]["stream"] is False
        assert "stream_options" not in server.bodies[0]
        server.answer = Answer([b"{}"], content_type="application/json")
        assert await target.count_tokens("some text") is None
        server.answer = Answer([b'{"error": "bad key"}'], "401 Unauthorized", "application/json")
        with pytest.raises(BenchError, match="refuses a request: HTTP_401: bad key"):
            await target.count_tokens("some text")
        assert await target.encode("some text") is None


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host/v1", "http://", "http://host:port/v1"])
def test_what_is_no_url_is_refused(url: str) -> None:
    """The message shows the shape that is wanted."""
    with pytest.raises(BenchError, match=r"--url: .* give http://host:port/v1"):
        HttpTarget(url, GenerationOptions(), time.perf_counter)
