"""The HTTP server of a running gateway: start and stop, limits, errors, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from gateway_fakes import TIMEOUT, FakeScheduler, Stack
from gateway_page import endings_of, value_of
from http_samples import CHAT, client_of, events_of, served
from metrics_page import scrape
from tokenizer_samples import byte_level

from gateway.http.server import MAX_HEADER_BYTES
from octavo.models.prepared import PreparedModel
from octavo.terminal.checks.finding import Level
from octavo.terminal.checks.ports import Page, PortUse, check_ports

COMPLETION = {"prompt": "the cat sat", "temperature": 0}


@pytest.mark.asyncio
async def test_health_is_that_of_grpc(prepared: PreparedModel) -> None:
    """200 while requests are served, 503 with when to ask again while not; both ends change together."""
    async with served(prepared) as (stack, http):
        assert (await http.get("/health")).json() == {"status": "serving"}
        assert (await http.head("/health")).status_code == (await http.head("/version")).status_code == 200
        stack.scheduler.send_pools([])
        await stack.wait_health(False)
        sick = await http.get("/health")
        assert (sick.status_code, sick.json(), sick.headers["retry-after"]) == (503, {"status": "not_serving"}, "1")
        asked = await http.head("/health")
        assert (asked.status_code, asked.content, asked.headers["retry-after"]) == (503, b"", "1")
        refused = await http.post("/v1/completions", json=COMPLETION)
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "service_unavailable_error")
        assert int(refused.headers["retry-after"]) >= 1
        streamed = await http.post("/v1/completions", json={**COMPLETION, "stream": True})
        assert (streamed.status_code, streamed.headers["content-type"]) == (503, "application/json")


@pytest.mark.asyncio
async def test_stop_ends_every_answer(prepared: PreparedModel) -> None:
    """At shutdown a stream gets an error event and no [DONE], a whole answer 503, and the port is closed."""
    scheduler = FakeScheduler(auto=False)
    async with served(prepared, scheduler) as (stack, http):
        whole = asyncio.create_task(http.post("/v1/completions", json=COMPLETION))
        stream = asyncio.create_task(http.post("/v1/chat/completions", json={**CHAT, "stream": True}))
        await scheduler.wait_received("submit", 2)
        scheduler.step()
        await stack.gateway.stop()
        answer = await whole
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        *_, last = events_of((await stream).text)
        assert last["error"]["code"] == "shutting_down"
        with pytest.raises(httpx.ConnectError):
            async with client_of(stack) as late:
                await late.get("/health")


@pytest.mark.asyncio
async def test_stop_cuts_clients_that_do_not_read(prepared: PreparedModel) -> None:
    """A stream whose client reads nothing, and a request that never comes whole, hold up no shutdown."""

    def endless(submit: Any, choice: int) -> list[int]:
        return [100] * submit.stopping.max_tokens

    async with served(prepared, FakeScheduler(script=endless)) as (stack, _):
        port = stack.gateway.http_port
        body = json.dumps({"prompt": "a", "max_tokens": 1000, "stream": True, "n": 100, "logprobs": 5}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: "
        _, deaf = await asyncio.open_connection("127.0.0.1", port, limit=1)
        deaf.write(f"{head}{len(body)}\r\n\r\n".encode() + body)
        _, slow = await asyncio.open_connection("127.0.0.1", port)
        slow.write(f"{head}{len(body)}\r\n\r\n".encode() + body[:10])
        await stack.scheduler.wait_received("submit", 1)
        async with asyncio.timeout(TIMEOUT):
            await stack.gateway.stop()
        for writer in (deaf, slow):
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def leaving(stack: Stack, body: dict[str, Any]) -> AsyncIterator[None]:
    """A request whose client has it submitted, and leaves at the end of the block."""
    async with client_of(stack) as http:
        asking = asyncio.create_task(http.post("/v1/completions", json=body))
        await stack.scheduler.wait_received("submit")
        yield
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.asyncio
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("state", ["submitted", "accepted", "running"])
async def test_a_client_that_leaves_cancels(prepared: PreparedModel, state: str, streaming: bool) -> None:
    """In whatever state a request is, its client's end is the scheduler's Cancel, and nothing stays."""
    scheduler = FakeScheduler(auto=False, accepts=state != "submitted")
    async with served(prepared, scheduler) as (stack, _):
        async with leaving(stack, {**COMPLETION, "stream": streaming}):
            if state == "running":
                scheduler.step()
        (cancel,) = await scheduler.wait_received("cancel")
        assert cancel.request == scheduler.of_kind("submit")[0].request
        await stack.wait_empty()
        assert endings_of(await stack.scrape()) == {("cancelled", "client"): 1}


@pytest.mark.asyncio
async def test_one_prompt_that_fails_ends_all(prepared: PreparedModel) -> None:
    """Of several prompts one is bad: the answer is its error with its place, before anything of a stream is sent."""
    async with served(prepared) as (stack, http):
        for streaming in (False, True):
            body = {"prompt": ["the", "on " * 2000, "cat"], "stream": streaming}
            refused = await http.post("/v1/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt[1]")
        await stack.wait_empty()


@pytest.mark.asyncio
async def test_bodies_that_are_none(prepared: PreparedModel) -> None:
    """Whatever comes in place of JSON of the right form is 400 in OpenAI's shape, and the connection goes on."""
    async with served(prepared) as (_, http):
        for content, kind in (
            (b"", "application/json"),
            (b"{", "application/json"),
            (b"[]", "application/json"),
            (b"null", "application/json"),
            (b"\xff\xfe", "application/json"),
            (b'{"prompt": ' + b"[" * 100_000, "application/json"),
            (b'{"prompt": "a", "n": ' + b"9" * 10_000 + b"}", "application/json"),
            (b'{"prompt": "a"}', "text/plain"),
            (b'{"prompt": "\\ud800"}', "application/json"),
            (b'{"\\ud800": 1, "prompt": "a"}', "application/json"),
            (b'{"prompt": "a", "temperature": NaN}', "application/json"),
            (b'{"prompt": "a", "temperature": Infinity}', "application/json"),
            (b'{"prompt": "a", "logit_bias": {"3": NaN}}', "application/json"),
        ):
            refused = await http.post("/v1/completions", content=content, headers={"content-type": kind})
            assert refused.status_code == 400, content[:40]
            assert set(refused.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.asyncio
async def test_bounds_of_what_is_read(prepared: PreparedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body above the limit is 413, told by its length or found by counting; so are headers, 400 and closed."""
    monkeypatch.setattr("gateway.http.caller.MAX_BODY_BYTES", 10_000)
    async with served(prepared) as (stack, http):
        fits = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
        http.headers["content-type"] = "application/json"
        assert (await http.post("/v1/completions", content=fits.ljust(10_000))).status_code == 200
        large = fits.ljust(10_001)

        async def in_pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(large), 1000):
                yield large[start : start + 1000]

        encoded = await http.post("/v1/completions", content=gzip.compress(fits), headers={"content-encoding": "gzip"})
        assert (encoded.status_code, encoded.json()["error"]["code"]) == (415, "body_encoded")
        plain = await http.post("/v1/completions", content=fits, headers={"content-encoding": "identity"})
        assert plain.status_code == 200
        for content in (large, in_pieces()):
            refused = await http.post("/v1/completions", content=content)
            assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.http_port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"y" * (2 * MAX_HEADER_BYTES))
        # What it did not read makes the end of the connection a reset, which may overtake the answer.
        with contextlib.suppress(ConnectionResetError):
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()
        with contextlib.suppress(ConnectionResetError):
            await writer.wait_closed()
        assert (await http.get("/health")).status_code == 200


@pytest.mark.asyncio
async def test_clients_that_left_without_a_word_are_not_waited_for(
    prepared: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection without a request, one whose headers never end though bytes of them come, the same behind an answer,
    and a body that never ends: all are closed, the last after a 408. An answer takes as long as it takes.
    """
    monkeypatch.setattr("gateway.http.protocol.HEAD_TIMEOUT", 0.3)
    monkeypatch.setattr("gateway.http.caller.BODY_TIMEOUT", 0.3)
    scheduler = FakeScheduler(auto=False)
    async with served(prepared, scheduler) as (stack, http), asyncio.timeout(TIMEOUT):
        slow_answer = asyncio.create_task(http.post("/v1/completions", json={**COMPLETION, "max_tokens": 2}))
        await scheduler.wait_received("submit")
        post = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        health = b"GET /health HTTP/1.1\r\nhost: a\r\n"

        async def end_of(sent: bytes, drip: bytes = b"") -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.http_port)
            writer.write(sent)
            reading = asyncio.create_task(reader.read())
            while drip and not (await asyncio.wait({reading}, timeout=0.05))[0]:
                writer.write(drip)
            try:
                return await reading
            except ConnectionError:
                # Bytes that came when the other end had closed reset the connection, and what it said is lost.
                return b""
            finally:
                writer.close()

        assert await end_of(b"") == b""
        assert await end_of(post) == await end_of(post, b"x: y\r\n") == b""
        assert (await end_of(health + b"\r\n" + health, b"x: y\r\n")).startswith(b"HTTP/1.1 200 ")
        while not (answer := await end_of(post + b'content-length: 99\r\nconnection: close\r\n\r\n{"prompt": ', b" ")):
            pass
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"body_too_slow"' in answer
        assert not slow_answer.done()
        scheduler.step()
        scheduler.step()
        assert (await slow_answer).status_code == 200


@pytest.mark.asyncio
async def test_paths_and_methods(prepared: PreparedModel) -> None:
    """What is not there is 404 (a slash too many is never redirected), the wrong method 405 with the right one, an
    option of the domain's that does not fit 400, all in OpenAI's shape.
    """
    async with served(prepared) as (_, http):
        nowhere = await http.get("/v1/embeddings")
        assert (nowhere.status_code, nowhere.json()["error"]["code"]) == (404, "not_found")
        slash = await http.post("/v1/completions/", json=COMPLETION)
        assert (slash.status_code, slash.json()["error"]["code"]) == (404, "not_found")
        told = await http.post("/tokenize", json={**CHAT, "add_special_tokens": False})
        assert (told.status_code, told.json()["error"]["param"]) == (400, "add_special_tokens")
        wrong = await http.get("/v1/completions")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        assert wrong.json()["error"]["code"] == "method_not_allowed"
        for path in ("/v1/models/", "/v1/models//"):
            assert (await http.get(path)).status_code == 404
        unknown = await http.get("/v1/models/nobody")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert (await http.get("/version")).json()["version"]
        assert "/v1/chat/completions" in (await http.get("/openapi.json")).json()["paths"]
        assert "openapi.json" in (await http.get("/docs")).text


@pytest.mark.asyncio
async def test_an_offer_of_another_protocol_is_left(prepared: PreparedModel, caplog: pytest.LogCaptureFixture) -> None:
    """Java's client offers HTTP/2 with every request: the answer is HTTP/1.1's, and no log fills."""
    async with served(prepared) as (_, http):
        with caplog.at_level(logging.INFO):
            for protocol in ("h2c", "websocket"):
                told = await http.get("/version", headers={"connection": "upgrade", "upgrade": protocol})
                assert told.status_code == 200
        assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


@pytest.mark.asyncio
async def test_one_metrics_page(prepared: PreparedModel) -> None:
    """The page on the HTTP port has the series of the metrics port, with requests of both fronts counted."""
    async with served(prepared) as (stack, http):
        await http.post("/v1/completions", json=COMPLETION)
        page = await http.get("/metrics")
        assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
        other = await scrape(stack.gateway.metrics_port)
        series = [line for line in page.text.splitlines() if line.startswith("octavo_requests_accepted_total")]
        assert series == [f'octavo_requests_accepted_total{{model="{prepared.name}"}} 1.0']
        assert value_of(other, "octavo_requests_accepted_total") == 1
        odd = await http.get("/metrics", headers={"accept": "application/openmetrics-text; version=abc"})
        assert (odd.status_code, odd.headers["content-type"]) == (200, page.headers["content-type"])
        only = await http.get("/metrics", params={"name[]": "octavo_requests_live"})
        assert {line.split("{")[0] for line in only.text.splitlines() if line[0] != "#"} == {"octavo_requests_live"}


@pytest.mark.asyncio
async def test_the_scheduler_hears_who_asks(prepared: PreparedModel) -> None:
    """Label, trace and seed of an HTTP request are in its record, as gRPC's are; the id is told in a header."""
    async with served(prepared) as (stack, http):
        headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
        answer = await http.post("/v1/completions", json={**COMPLETION, "user": "ann", "seed": 5}, headers=headers)
        (submit,) = stack.scheduler.of_kind("submit")
        assert (submit.sampling.seed, submit.traceparent) == (5, headers["traceparent"])
        assert list(submit.prompt_token_ids) == byte_level().tokenizer.encode("the cat sat").ids
        assert answer.headers["x-request-id"] == answer.json()["id"].removeprefix("cmpl-")


@pytest.mark.asyncio
async def test_a_bug_is_told_without_its_words(prepared: PreparedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody expected is 500 without a word of its cause, in a stream an error event; the log has it."""

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("secret")

    async with served(prepared) as (stack, http):
        monkeypatch.setattr("gateway.http.choices.WholeAnswer.fields", broken)
        monkeypatch.setattr("gateway.http.choices.StreamedAnswer.end", broken)
        whole = await http.post("/v1/completions", json=COMPLETION)
        assert (whole.status_code, whole.json()["error"]["code"]) == (500, "internal")
        stream = await http.post("/v1/completions", json={**COMPLETION, "stream": True})
        assert events_of(stream.text)[-1]["error"]["code"] == "internal"
        assert "secret" not in whole.text + stream.text
        await stack.wait_empty()


@pytest.mark.asyncio
async def test_the_doctor_knows_the_port(prepared: PreparedModel) -> None:
    """`octavo doctor` tells the HTTP port from a program that is not Octavo's, by a page that needs no key."""
    async with served(prepared) as (stack, _):
        ports = (stack.gateway.http_port, stack.gateway.metrics_port)
        uses = [PortUse("http", "127.0.0.1", port, "--http-port", page=Page.OPENAI) for port in ports]
        own, other = await check_ports(uses)
        assert (own.level, other.level) == (Level.OK, Level.PROBLEM)
        assert "OpenAI-compatible" in own.text
