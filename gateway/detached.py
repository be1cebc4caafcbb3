"""Requests that outlive their clients: kept for the grace that they asked for, until they end or are taken up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.live_request import LiveRequest

End = Callable[[LiveRequest, BaseException | None], None]
"""Ends a request: takes what has ended it, None where it is complete or nobody wants it any more."""


class Detached:
    """Holds requests without a client. They stay among the live ones, so a lost scheduler is given them again."""

    def __init__(self, end: End) -> None:
        self._end = end
        self._tasks: dict[asyncio.Task[None], LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def requests(self) -> set[LiveRequest]:
        """Return those that are held."""
        return set(self._tasks.values())

    def hold(self, request: LiveRequest) -> None:
        """Keep a request, which has a resume_grace, until it ends or its grace is over."""
        task = asyncio.create_task(self._hold(request), name="detached-request")
        self._tasks[task] = request
        task.add_done_callback(self._tasks.pop)

    async def _hold(self, request: LiveRequest) -> None:
        try:
            async with asyncio.timeout(request.resume_grace):
                while not request.has_ended:
                    await request.changed.wait()
                    request.changed.clear()
        except TimeoutError:
            self._end(request, None)
        else:
            self._end(request, request.error)
