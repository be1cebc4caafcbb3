"""The events of one HTTP request, which may be several of the domain's: one for each prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from gateway.http.names import PROMPT_FIELDS
from gateway.requests import Event, GenerateCommand
from octavo.rpc.errors import FieldViolation, ServiceError, invalid_argument


class OneReading(Protocol):
    """The events of one request of the domain's."""

    @property
    def request_id(self) -> str:
        """The id that the gateway gave it."""

    async def next_events(self) -> list[Event]:
        """Return what has happened, waiting for it; nothing once all has been told. Raises ServiceError."""


Open = Callable[[GenerateCommand], AbstractAsyncContextManager[OneReading]]
"""Runs a command while the context is open."""


class Reading(Protocol):
    """The events of all prompts."""

    async def next_events(self) -> tuple[int, list[Event]]:
        """Return a prompt's index and what has happened to it; no events once all is told. Raises ServiceError."""


@asynccontextmanager
async def read_all(open_one: Open, commands: Sequence[GenerateCommand]) -> AsyncIterator[Reading]:
    """Run commands at once while the context is open. One that fails ends all, and its ServiceError is raised."""
    if len(commands) == 1:
        async with open_one(commands[0]) as reading:
            yield _Single(reading)
        return
    several = _Several(len(commands))
    try:
        async with asyncio.TaskGroup() as group:
            for index, command in enumerate(commands):
                group.create_task(several.run(index, open_one, command))
            yield several
    except BaseExceptionGroup as errors:
        raise _first_of(errors) from None


class _Single:
    def __init__(self, reading: OneReading) -> None:
        self._reading = reading

    async def next_events(self) -> tuple[int, list[Event]]:
        return 0, await self._reading.next_events()


class _Several:
    """Prompts read by a task each. What waits here is bounded: what is not read yet stays in the requests' records."""

    def __init__(self, count: int) -> None:
        self._num_running = count
        self._waiting: asyncio.Queue[tuple[int, list[Event]]] = asyncio.Queue(count)

    async def run(self, index: int, open_one: Open, command: GenerateCommand) -> None:
        try:
            async with open_one(command) as reading:
                while events := await reading.next_events():
                    await self._waiting.put((index, events))
        except ServiceError as error:
            raise _of_prompt(error, index) from None
        await self._waiting.put((index, []))

    async def next_events(self) -> tuple[int, list[Event]]:
        while self._num_running:
            index, events = await self._waiting.get()
            if events:
                return index, events
            self._num_running -= 1
        return 0, []


def _of_prompt(error: ServiceError, index: int) -> ServiceError:
    """Return an error that says which of the prompts is at fault, where one is."""
    if not any(each.field in PROMPT_FIELDS for each in error.violations):
        return error
    violations = [
        FieldViolation(f"{each.field}[{index}]", each.description) if each.field in PROMPT_FIELDS else each
        for each in error.violations
    ]
    return invalid_argument(violations, error.metadata)


def _first_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error = errors.exceptions[0]
    return _first_of(error) if isinstance(error, BaseExceptionGroup) else error
