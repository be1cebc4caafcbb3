"""Priority, limits of time, the cache and permits over HTTP."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_fakes import FakeScheduler
from http_samples import CHAT, events_of, served

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
