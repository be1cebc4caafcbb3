"""A small OpenAI-compatible server on a free port, which sends exactly the bytes that a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

EVENT_STREAM = "text/event-stream; charset=utf-8"


def event(**fields: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text_event(text: str, finish_reason: str | None = None) -> bytes:
    """An event of /completions."""
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish_reason}])


def chat_event(finish_reason: str | None = None, **delta: Any) -> bytes:
    """An event of /chat/completions."""
    return event(choices=[{"index": 0, "delta": delta, "finish_reason": finish_reason}])


def usage_event(prompt_tokens: int, completion_tokens: int) -> bytes:
    """The event that stream_options.include_usage asks for: no choices."""
    return event(choices=[], usage={"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens})


DONE = b"data: [DONE]\n\n"
MODELS = b'{"data": [{"id": "m", "max_model_len": 512}]}'


@dataclass
class Answer:
    """What a POST gets: pieces of the body, each flushed by itself."""

    pieces: Sequence[bytes] = ()
    status: str = "200 OK"
    content_type: str = EVENT_STREAM
    is_cut: bool = False
    """The connection ends within the body."""
    hangs: bool = False
    """Nothing more comes, until the client goes away."""


@dataclass
class OpenAiServer:
    """Answers POSTs with `answer`, GET /v1/models with `models`; notes what it was asked."""

    url: str = ""
    answer: Answer = field(default_factory=Answer)
    models: Answer = field(default_factory=lambda: Answer([MODELS], content_type="application/json"))
    count: Answer | None = None
    """What a request without streaming gets; None: `answer` too."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    client_left: asyncio.Event = field(default_factory=asyncio.Event)
    connections: dict[asyncio.Task[None], asyncio.StreamWriter] = field(default_factory=dict)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        task = asyncio.current_task()
        assert task is not None
        self.connections[task] = writer
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.requests.append((head[0].rsplit(" ", 1)[0], headers))
                if body:
                    self.bodies.append(json.loads(body))
                if not await self._send(self._answer_to(body), reader, writer):
                    break
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    def _answer_to(self, body: bytes) -> Answer:
        if not body:
            return self.models
        if not json.loads(body)["stream"]:
            return self.count if self.count is not None else self.answer
        return self.answer

    async def _send(self, answer: Answer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = f"HTTP/1.1 {answer.status}\r\ncontent-type: {answer.content_type}\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head.encode())
        for piece in answer.pieces:
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0)
        if answer.hangs:
            assert await reader.read() == b""
            self.client_left.set()
            return False
        if answer.is_cut:
            return False
        writer.write(b"0\r\n\r\n")
        return True


@contextlib.asynccontextmanager
async def openai_server(answer: Answer | None = None) -> AsyncIterator[OpenAiServer]:
    """Serve on a free port."""
    fake = OpenAiServer(answer=answer or Answer())
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield fake
    finally:
        server.close()
        for writer in fake.connections.values():
            writer.close()
        await asyncio.gather(*fake.connections)
        await server.wait_closed()
