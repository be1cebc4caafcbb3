"""Runs an example as a user does, and checks what every one of them, in any language, must do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
from stack import TIMEOUT, InProcessStack, get_load, wait_idle
from stack_client import generate, request_for

from octavo.rpc.server import RpcServer
from octavo.v1 import inference_pb2, inference_pb2_grpc

ROOT = Path(__file__).parents[2]
QUESTION = "What does the keeper of the lighthouse say?"
MAX_TOKENS = 256
CONTEXT = 16384
"""Tokens of the model's context: so many that nobody sees an answer fill it."""

CANCEL_AFTER = 5
Command = Sequence[str | Path]


@dataclass(frozen=True)
class Run:
    """What a program printed and how it ended."""

    stdout: str
    stderr: str
    exit_status: int


@contextlib.asynccontextmanager
async def started(
    command: Command, *args: str, folder: Path | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a program in a folder (default: the tests') with its output on pipes; it does not outlive the block."""
    pipe = asyncio.subprocess.PIPE
    # A user's Python buffers what it writes to a pipe; that it is flushed is for the example to see to.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = await asyncio.create_subprocess_exec(*command, *args, stdout=pipe, stderr=pipe, env=environ, cwd=folder)
    try:
        async with asyncio.timeout(TIMEOUT):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        # Reads to the end of both pipes, so that nothing of the process stays on the loop.
        await process.communicate()


async def run(command: Command, *args: str, folder: Path | None = None) -> Run:
    """Run a program to its end."""
    async with started(command, *args, folder=folder) as process:
        stdout, stderr = await process.communicate()
        assert process.returncode is not None
        return Run(stdout.decode(), stderr.decode(), process.returncode)


async def check_chat(cell: InProcessStack, command: Command) -> None:
    """The text printed is, to the byte, that of the greedy answer to the same chat."""
    request = request_for([], MAX_TOKENS)
    request.chat.messages.add(role=inference_pb2.CHAT_ROLE_USER, content=QUESTION)
    choice = (await generate(cell, request)).choices[0]
    assert choice.finished is not None
    assert len(choice.text) > MAX_TOKENS / 4, "too little of an answer to compare"
    done = await run(command, cell.gateway_address, "chat", QUESTION)
    assert done.exit_status == 0, done.stderr
    assert done.stdout == choice.text + "\n"
    reason = inference_pb2.FinishReason.Name(choice.finished.reason)
    assert done.stderr == f"{reason}, {choice.finished.completion_tokens} tokens\n"


async def check_cancel(cell: InProcessStack, command: Command) -> None:
    """A cancel after a few tokens frees the request long before the context would be full."""
    done = await run(command, cell.gateway_address, "cancel")
    assert done.exit_status == 0, done.stderr
    ending = done.stdout.splitlines()[-1]
    start, _, code = ending.partition(" tokens: ")
    assert code == "CANCELLED"
    assert int(start.removeprefix("broken off after ")) >= CANCEL_AFTER
    load = await wait_idle(cell)
    (executor,) = load.executors
    # The answer would have taken a step for each token that the context has room for.
    assert 0 < executor.num_steps < CONTEXT / 2


async def check_error(cell: InProcessStack, command: Command) -> None:
    """Code, reason and every bad field are printed, from the details and not from the message; nothing was started."""
    done = await run(command, cell.gateway_address, "error")
    assert done.exit_status == 0, done.stderr
    code, message, *details = done.stdout.splitlines()
    assert code == "code INVALID_ARGUMENT"
    assert details == [
        "reason INVALID_REQUEST",
        "field sampling.temperature: must be 0 to 2, is 9",
        "field sampling.top_p: must be above 0 and at most 1, is 0",
        "field n: must be 1 to 128, is 0",
    ]
    assert message.startswith("message sampling.temperature: ")
    assert (await get_load(cell)).executors[0].num_steps == 0


async def check_no_server(command: Command) -> None:
    """Where nobody listens, the program ends with the code on stderr and status 1; it neither waits nor breaks."""
    with socket.socket() as taken:
        # Bound and not listening: nobody else gets the port, and every connection is refused.
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for args in (["chat", QUESTION], ["cancel"]):
            done = await run(command, address, *args)
            assert (done.exit_status, done.stdout) == (1, "")
            assert done.stderr.startswith("code UNAVAILABLE\nmessage ")


async def check_usage(command: Command) -> None:
    """Arguments that mean nothing are answered with the usage and status 2, before any connection."""
    for args in ([], ["127.0.0.1:1"], ["127.0.0.1:1", "chat"], ["127.0.0.1:1", "sing"], ["127.0.0.1:1", "error", "x"]):
        done = await run(command, *args)
        assert (done.exit_status, done.stdout) == (2, ""), args
        assert "usage: " in done.stderr


async def check_streams(command: Command) -> None:
    """Text is on the screen as soon as it is there: the rest is held back until the first piece has been read."""
    async with halting_server() as (address, go_on), started(command, address, "chat", QUESTION) as process:
        assert process.stdout is not None
        assert await process.stdout.readexactly(3) == b"One"
        go_on.set()
        assert await process.stdout.read() == b" two\n"
        assert await process.wait() == 0


class HaltingServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Sends one piece of text, and the rest when it is told to."""

    def __init__(self, go_on: asyncio.Event) -> None:
        self._go_on = go_on

    async def Generate(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:  # noqa: N802
        """Stream two deltas with a halt between them."""
        response = inference_pb2.GenerateResponse
        await context.write(response(started=inference_pb2.Started(prompt_tokens=1)))
        await context.write(response(delta=inference_pb2.Delta(text="One", token_ids=[7])))
        await self._go_on.wait()
        await context.write(response(delta=inference_pb2.Delta(first_token_index=1, text=" two", token_ids=[8])))
        finished = inference_pb2.ChoiceFinished(reason=inference_pb2.FINISH_REASON_LENGTH, completion_tokens=2)
        await context.write(response(choice_finished=finished))
        await context.write(response(usage=inference_pb2.Usage(prompt_tokens=1, completion_tokens=2)))


@contextlib.asynccontextmanager
async def halting_server() -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Serve a HaltingServicer, with reflection; yields its address and the event that lets it go on."""
    server = RpcServer("127.0.0.1", 0)
    go_on = asyncio.Event()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(HaltingServicer(go_on), server.server)
    await server.start("octavo.v1.InferenceService")
    try:
        yield f"127.0.0.1:{server.port}", go_on
    finally:
        go_on.set()
        await server.stop(0)
