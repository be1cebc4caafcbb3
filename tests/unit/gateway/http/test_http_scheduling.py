"""Priority, limits of time, the cache and permits over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gateway_fakes import TIMEOUT, FakeScheduler, running_stack
from gateway_page import value_of
from http_samples import CHAT, client_of, events_of, served

from octavo.models.prepared import PreparedModel

TEXT = "the cat sat"
NANOS = 1_000_000_000
WRONG: list[dict[str, Any]] = [
    {"priority": 1.5},
    {"priority": 10**30},
    {"queue_ttl": "5"},
    {"first_token_target": True},
    {"cache_salt": 5},
    {"bypass_cache": 1},
]


@pytest.mark.asyncio
async def test_fields_over_http(prepared: PreparedModel) -> None:
    """Both kinds of requests take the fields by OpenAI-like names, times in seconds, and name bad ones so."""
    fields = {"priority": 5, "queue_ttl": 2.5, "first_token_target": 9, "cache_salt": "x", "bypass_cache": True}
    async with served(prepared) as (stack, http):
        for path, body in (("chat/completions", CHAT), ("completions", {"prompt": [TEXT, TEXT]})):
            answer = await http.post(f"/v1/{path}", json={**body, **fields})
            assert answer.status_code == 200, answer.text
            bad = {"priority": -101, "queue_ttl": -1, "first_token_target": 0, "cache_salt": "x" * 129}
            error = (await http.post(f"/v1/{path}", json={**body, **bad})).json()["error"]
            assert error["param"] == "priority"
            for name in bad:
                assert f"{name}: m" in error["message"]
            for wrong in WRONG:
                refused = await http.post(f"/v1/{path}", json={**body, **wrong})
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(wrong)))
        submits = stack.scheduler.of_kind("submit")
        assert len(submits) == 3
        for submit in submits:
            assert (submit.priority, submit.cache_salt, submit.bypass_cache) == (5, "x", True)
            assert 0 < submit.remaining_queue_ttl.ToNanoseconds() <= 2.5 * NANOS
            assert 2.5 * NANOS < submit.remaining_first_token.ToNanoseconds() <= 9 * NANOS


@pytest.mark.asyncio
async def test_cached_tokens_over_http(prepared: PreparedModel) -> None:
    """usage.prompt_tokens_details is OpenAI's, always there, and adds up over prompts, streamed or not."""
    async with served(prepared, FakeScheduler(cached_when_run=3)) as (stack, http):
        for body, cached in (({"prompt": TEXT}, 3), ({"prompt": [TEXT, TEXT], "n": 2}, 6)):
            whole = (await http.post("/v1/completions", json=body)).json()["usage"]
            options = {"stream": True, "stream_options": {"include_usage": True}}
            streamed = events_of((await http.post("/v1/completions", json={**body, **options})).text)[-2]["usage"]
            assert whole == streamed
            assert whole["prompt_tokens_details"] == {"cached_tokens": cached}
        stack.scheduler.cached_when_run = 0
        usage = (await http.post("/v1/chat/completions", json=CHAT)).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.asyncio
async def test_too_many_requests(prepared: PreparedModel) -> None:
    """429 with when to try again, before anything is sent; the permits of an answer are free once it has left."""
    scheduler = FakeScheduler(auto=False)
    async with running_stack(prepared, scheduler, max_requests=4) as stack, client_of(stack) as http:
        running = asyncio.create_task(http.post("/v1/completions", json={"prompt": [TEXT, TEXT], "stream": True}))
        await scheduler.wait_received("submit", 2)
        for path, body in (("chat/completions", {**CHAT, "n": 3}), ("completions", {"prompt": [TEXT] * 3})):
            for streaming in (False, True):
                refused = await http.post(f"/v1/{path}", json={**body, "stream": streaming})
                error = refused.json()["error"]
                assert (refused.status_code, error["code"], error["type"]) == (
                    429,
                    "too_many_requests",
                    "rate_limit_error",
                )
                assert refused.headers["retry-after"] == "1"
        # Not even some of the prompts of a request were run.
        assert len(scheduler.of_kind("submit")) == 2
        assert stack.gateway.permits.num_free == 2
        scheduler.step(40)
        assert (await running).text.endswith("data: [DONE]\n\n")
        assert stack.gateway.permits.num_free == 4


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {**CHAT, "n": 5}, "n"),
        ("chat/completions", {**CHAT, "best_of": 5}, "best_of"),
        ("completions", {"prompt": TEXT, "n": 5}, "n"),
        ("completions", {"prompt": [TEXT] * 3, "n": 2}, "prompt"),
    ],
)
async def test_what_can_never_fit(prepared: PreparedModel, path: str, body: dict[str, Any], param: str) -> None:
    """What is more than the gateway serves at once is refused for good, by the field that makes it so."""
    async with running_stack(prepared, max_requests=4) as stack, client_of(stack) as http:
        refused = await http.post(f"/v1/{path}", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert "retry-after" not in refused.headers


@pytest.mark.asyncio
@pytest.mark.parametrize("streaming", [False, True])
async def test_whoever_leaves_gives_the_permits_back(prepared: PreparedModel, streaming: bool) -> None:
    """A client that closes its connection frees its permits, streamed or not."""
    scheduler = FakeScheduler(script=lambda submit, choice: [100] * 1000)
    async with running_stack(prepared, scheduler, max_requests=8) as stack:
        body = {"prompt": "a", "max_tokens": 1000, "n": 8, "logprobs": 5, "stream": streaming}
        async with client_of(stack) as http:
            asking = asyncio.create_task(http.post("/v1/completions", json=body))
            await scheduler.wait_received("submit")
            assert stack.gateway.permits.num_free == 0
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await stack.wait_empty()
        async with asyncio.timeout(TIMEOUT):
            while value_of(await stack.scrape(), "octavo_permits_free") != 8:
                pass
