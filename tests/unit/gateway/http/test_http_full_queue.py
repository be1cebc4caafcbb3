"""A full queue over HTTP: refused before anything of the body is read."""

from __future__ import annotations

import pytest
from gateway_fakes import queue_of
from http_samples import CHAT, served

from octavo.models.prepared import PreparedModel


@pytest.mark.asyncio
async def test_http_refuses_before_it_reads_the_body(prepared: PreparedModel) -> None:
    """429 with when to come again, also for a body that is no JSON, which nobody has looked at; other paths are open,
    and once there is room requests are served.
    """
    async with served(prepared) as (stack, http):
        await stack.report_queues(
            queue_of(prepared, max_choices=4, drained_choices_per_second=0.25, drained_tokens_per_second=9)
        )
        for path, body in (("/v1/chat/completions", b"{"), ("/v1/completions", b'{"prompt": "the cat"}')):
            answer = await http.post(path, content=body, headers={"content-type": "application/json"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
            assert answer.headers["retry-after"] == "4"
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/v1/models")).status_code == 200
        await stack.report_queues(queue_of(prepared, max_choices=5))
        two = await http.post("/v1/completions", json={"prompt": ["the", "cat"]})
        assert (two.status_code, two.json()["error"]["code"]) == (429, "queue_full")
        await stack.report_queues()
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
