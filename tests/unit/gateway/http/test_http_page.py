"""The bounds that the OpenAPI page tells are those that the domain checks."""

from __future__ import annotations

from typing import Any

import pytest
from http_samples import served

from gateway.http.fields import CompletionRequest
from octavo.models.prepared import PreparedModel

BOUNDS = {
    "n": (1, 128),
    "best_of": (1, 128),
    "temperature": (0, 2),
    "top_p": (None, 1),
    "min_p": (0, 1),
    "typical_p": (None, 1),
    "repetition_penalty": (None, 2),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "truncate_prompt_tokens": (1, None),
    "prompt_logprobs": (0, 20),
    "logprobs": (0, 20),
}
"""Least and most; None: the page tells a bound that is out itself, or none."""


def told(name: str) -> tuple[Any, Any]:
    """The bounds of a field on the page."""
    schema = CompletionRequest.model_json_schema()["properties"][name]
    kind = next(each for each in schema["anyOf"] if each.get("type") != "null")
    return schema.get("minimum", kind.get("minimum")), schema.get("maximum")


@pytest.mark.parametrize("name", BOUNDS)
def test_the_page_tells_bounds(name: str) -> None:
    """A field's bounds stand on the page."""
    assert told(name) == BOUNDS[name]


@pytest.mark.asyncio
async def test_the_domain_has_the_same_bounds(prepared: PreparedModel) -> None:
    """At each bound a request runs, just beyond it is refused by the field's name."""
    async with served(prepared) as (_, http):
        for name, bounds in BOUNDS.items():
            step = 1 if "number" not in str(CompletionRequest.model_json_schema()["properties"][name]) else 0.001
            for bound, beyond in zip(bounds, (-step, step), strict=True):
                if bound is None:
                    continue
                body = {"prompt": "the cat", "max_tokens": 1, name: bound}
                assert (await http.post("/v1/completions", json=body)).status_code == 200, (name, bound)
                refused = await http.post("/v1/completions", json={**body, name: bound + beyond})
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, name), (name, bound)
        for name in ("top_p", "typical_p", "repetition_penalty"):
            refused = await http.post("/v1/completions", json={"prompt": "the cat", name: 0})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
