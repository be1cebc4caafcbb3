"""The example that knows the service by reflection alone, run as a program against a real cell."""

from __future__ import annotations

import sys

import pytest
from example_programs import (
    ROOT,
    check_cancel,
    check_chat,
    check_error,
    check_no_server,
    check_streams,
    check_usage,
)
from stack import InProcessStack

CLIENT = (sys.executable, ROOT / "examples" / "reflection" / "client.py")


@pytest.mark.asyncio
async def test_chat_prints_the_greedy_answer(cell: InProcessStack) -> None:
    """The text printed is that of the same chat asked by the tests' own client."""
    await check_chat(cell, CLIENT)


@pytest.mark.asyncio
async def test_chat_prints_while_the_answer_is_written() -> None:
    """The first piece is on the screen before the second is made."""
    await check_streams(CLIENT)


@pytest.mark.asyncio
async def test_cancel_frees_the_request(cell: InProcessStack) -> None:
    """The call ends CANCELLED after a few tokens, and the cell is idle long before the answer would have ended."""
    await check_cancel(cell, CLIENT)


@pytest.mark.asyncio
async def test_error_names_every_field(cell: InProcessStack) -> None:
    """The details of a refusal are read: reason and all three fields."""
    await check_error(cell, CLIENT)


@pytest.mark.asyncio
async def test_no_server_is_an_error_at_once() -> None:
    """Without a server the program says UNAVAILABLE and fails."""
    await check_no_server(CLIENT)


@pytest.mark.asyncio
async def test_usage() -> None:
    """Wrong arguments are answered with what is right."""
    await check_usage(CLIENT)
