"""Runs a generation and sends what comes of it, whole or as a stream."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.http.choices import StreamedAnswer, Style, WholeAnswer
from gateway.http.connection import end_events, send_events, send_failure, send_json, start_events, while_connected
from gateway.http.envelope import Asked, event_bytes
from gateway.http.errors import INTERNAL, Failure, Rename, failure_from
from gateway.http.reading import Open, Reading, read_all
from gateway.requests import Event, GenerateCommand, Started
from octavo.rpc.errors import ServiceError

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"


class GenerationResponse(Response):
    """The answer to a request for output. Nothing runs until it is sent; it ends when the client leaves."""

    def __init__(
        self,
        open_one: Open,
        commands: Sequence[GenerateCommand],
        asked: Asked,
        make_style: Callable[[], Style],
        rename: Rename,
        hold_permits: Callable[[], AbstractContextManager[None]],
        *,
        streaming: bool,
    ) -> None:
        """`make_style` raises ServiceError where the model is unknown; `rename` gives HTTP's names of fields.

        `hold_permits` raises ServiceError where there are none; they are held until all has been sent.
        """
        super().__init__()
        self._open = open_one
        self._commands = commands
        self._asked = asked
        self._make_style = make_style
        self._rename = rename
        self._hold_permits = hold_permits
        self._streaming = streaming
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's own
        """Run and send."""
        await while_connected(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        try:
            with self._hold_permits():
                async with read_all(self._open, self._commands) as reading:
                    await (self._send_stream if self._streaming else self._send_whole)(reading, send)
        except ServiceError as error:
            failure = failure_from(error, self._rename)
        except Exception:
            logger.exception("handler failed")
            failure = INTERNAL
        else:
            return
        await self._send_failure(send, failure)

    async def _send_whole(self, reading: Reading, send: Send) -> None:
        early, started = await _read_started(reading, len(self._commands))
        answer = WholeAnswer(self._asked, self._make_style(), started)
        for prompt, events in early:
            answer.take(prompt, events)
        while (news := await reading.next_events())[1]:
            answer.take(*news)
        fields = answer.fields()
        self._has_begun = True
        await send_json(send, fields, {REQUEST_ID_HEADER: started.request_id})

    async def _send_stream(self, reading: Reading, send: Send) -> None:
        # Nothing is sent before every prompt was accepted: until then an error still has a status.
        early, started = await _read_started(reading, len(self._commands))
        answer = StreamedAnswer(self._asked, self._make_style(), started)
        self._has_begun = True
        await start_events(send, {REQUEST_ID_HEADER: started.request_id})
        await send_events(send, answer.begin() + b"".join(answer.take(*each) for each in early))
        while (news := await reading.next_events())[1]:
            if pieces := answer.take(*news):
                await send_events(send, pieces)
        await send_events(send, answer.end())
        await end_events(send)

    async def _send_failure(self, send: Send, failure: Failure) -> None:
        if not self._has_begun:
            await send_failure(send, failure)
        elif self._streaming:
            # As OpenAI does it: an event of its own, and no [DONE].
            await send_events(send, event_bytes(failure.body))
            await end_events(send)


async def _read_started(reading: Reading, num_prompts: int) -> tuple[list[tuple[int, list[Event]]], Started]:
    """Read until every prompt was accepted; return what was read, and the first prompt's Started."""
    early: list[tuple[int, list[Event]]] = []
    started: dict[int, Started] = {}
    while len(started) < num_prompts:
        prompt, events = await reading.next_events()
        early.append((prompt, events))
        started.update((prompt, event) for event in events if isinstance(event, Started))
    return early, started[0]
