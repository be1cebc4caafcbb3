"""Requests made up from the OpenAPI page, good and bad ones, against a whole cell."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, find, given, seed, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from stack import TIMEOUT, ProcessStack, wait_serving

EXAMPLES = 40
ENDPOINTS = {
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/health"),
    ("GET", "/version"),
    ("GET", "/metrics"),
}
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture
def cell(shared_processes: ProcessStack) -> ProcessStack:
    """A cell of processes that serves."""
    asyncio.run(wait_serving(shared_processes.gateway_address))
    return shared_processes


def page_of(stack: ProcessStack) -> dict[str, Any]:
    """The OpenAPI page of the cell's gateway."""
    page: dict[str, Any] = httpx.get(f"http://{stack.http_address}/openapi.json", trust_env=False).json()
    return page


def test_the_page_lists_every_endpoint(cell: ProcessStack) -> None:
    """The page has what is served, and errors of the one shape; of FastAPI's own kind of error it says nothing."""
    page = page_of(cell)
    listed = {(method.upper(), path) for path, operations in page["paths"].items() for method in operations}
    assert listed == ENDPOINTS
    for operations in page["paths"].values():
        for operation in operations.values():
            assert "422" not in operation["responses"]
            for status, answer in operation["responses"].items():
                if status.startswith("4"):
                    schema = answer["content"]["application/json"]["schema"]
                    assert schema == {"$ref": "#/components/schemas/Error"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("method", "path"), sorted(ENDPOINTS), ids=lambda each: each.strip("/"))
def test_no_request_breaks_the_server(cell: ProcessStack, method: str, path: str) -> None:
    """Whatever is sent is answered in time, as the page says: a status it lists, JSON of its shape, never a 5xx."""
    schema: BaseSchema = schemathesis.openapi.from_dict(page_of(cell))
    operation = schema[path][method]
    modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
    cases = st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in modes))
    statuses = set()

    @seed(0)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def check(case: Case) -> None:
        _keep_short(case)
        response = case.call(base_url=f"http://{cell.http_address}", timeout=TIMEOUT, proxies={"http": "", "https": ""})
        statuses.add(response.status_code)
        if "text/event-stream" in response.headers.get("content-type", [""])[0]:
            assert response.text.endswith("data: [DONE]\n\n")
            return
        case.validate_response(response, checks=CHECKS)

    check()
    assert statuses <= {200, 400, 404, 405}, statuses
    if path != "/v1/models/{model}" and 200 not in statuses:
        _find_a_good_request(cell, operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
    assert method == "GET" or 400 in statuses
    assert httpx.get(f"http://{cell.http_address}/health", trust_env=False).status_code == 200


def _find_a_good_request(cell: ProcessStack, cases: st.SearchStrategy[Case]) -> None:
    """Look further for a request that succeeds: the page must not describe only what is refused."""

    def succeeds(case: Case) -> bool:
        _keep_short(case)
        response = case.call(base_url=f"http://{cell.http_address}", timeout=TIMEOUT, proxies={"http": "", "https": ""})
        return response.status_code == 200

    quiet = settings(max_examples=1000, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    find(cases, succeeds, settings=settings(quiet, suppress_health_check=list(HealthCheck)))


def _keep_short(case: Case) -> None:
    """Cap what a good request costs, and leave out deadlines: long outputs and late ones are other tests' matter."""
    if case.headers is not None:
        case.headers.pop("X-Request-Timeout", None)
    body = case.body
    if not isinstance(body, dict):
        return
    if isinstance(body.get("model"), str):
        body["model"] = "tiny"
    if not case.operation.path.endswith("completions"):
        return
    for limit in ("queue_ttl", "first_token_target"):
        if isinstance(body.get(limit), int | float) and body[limit] > 0:
            body[limit] = 60.0
    # Fields that go together are drawn each by itself, which makes nearly every body a bad one.
    for name, needed in (("stream_options", "stream"), ("top_logprobs", "logprobs")):
        if not body.get(needed) and not isinstance(body.get("prompt"), list | str):
            body.pop(name, None)
    for name in ("best_of", "min_tokens", "add_generation_prompt", "continue_final_message", "max_completion_tokens"):
        body.pop(name, None)
    for name in ("logit_bias", "stop", "stop_token_ids", "bad_words"):
        if len(repr(body)) % 4:
            body.pop(name, None)
    for message in body["messages"] if isinstance(body.get("messages"), list) else ():
        if isinstance(message, dict) and message.get("content") is None:
            message["content"] = "so"
    body["max_tokens"] = 3 if not isinstance(body.get("max_tokens"), int) else min(body["max_tokens"], 3)
