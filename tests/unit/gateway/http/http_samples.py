"""A gateway with its scripted scheduler, and a plain HTTP client of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from gateway_fakes import TIMEOUT, FakeScheduler, Stack, running_stack

from octavo.models.prepared import PreparedModel

CHAT = {"messages": [{"role": "user", "content": "the cat"}]}


def client_of(stack: Stack) -> httpx.AsyncClient:
    """A client of the gateway."""
    base = f"http://127.0.0.1:{stack.gateway.http_port}"
    return httpx.AsyncClient(base_url=base, trust_env=False, timeout=TIMEOUT)


@asynccontextmanager
async def served(
    prepared: PreparedModel, scheduler: FakeScheduler | None = None
) -> AsyncIterator[tuple[Stack, httpx.AsyncClient]]:
    """Run a gateway and a client of its HTTP API."""
    async with running_stack(prepared, scheduler) as stack, client_of(stack) as http:
        yield stack, http


def events_of(text: str) -> list[Any]:
    """Return the events of a stream: JSON, or what is none as it is."""
    payloads = [each.removeprefix("data: ") for each in text.removesuffix("\n\n").split("\n\n")]
    return [json.loads(payload) if payload.startswith("{") else payload for payload in payloads]
