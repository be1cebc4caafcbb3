"""Starts the services of a cell, keeps them running, and stops them in order."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from octavo.local.child import Child
from octavo.local.plan import CellPlan
from octavo.local.start_log import StageProgress, StartLog
from octavo.rpc.settings import variable_of
from octavo.settings import GatewaySettings

RESUME_KEY = variable_of(GatewaySettings, "resume_key")
STOP_GRACE = 15.0
"""Seconds that a service gets to end by itself. Its own choreography takes a few."""
FIRST_PAUSE = 0.5
LAST_PAUSE = 30.0
"""Seconds before a dead service is started again: the first, doubled at each further death, up to the last."""
STEADY = 60.0
"""Seconds of life after which a death counts as the first again."""
REMINDER = 10.0
"""Seconds without news after which the wait for the start says what it waits for."""
LOOK = 0.1
"""Seconds between two looks into the logs during the start."""

Reporter = Callable[[str], None]
"""Takes one line for the person who waits."""
ProgressReporter = Callable[[str, int, int], None]
"""Takes what is being done, the bytes done, and the bytes in all."""
Probe = Callable[[str], Coroutine[Any, Any, None]]
"""Returns once the service at an address serves."""


class StartError(Exception):
    """A service ended before it served; the message holds the end of its log."""


class Supervisor:
    """The processes of one cell. `start` once, then `run`, then `stop`, which is safe at any moment."""

    def __init__(
        self,
        plan: CellPlan,
        logs: Path,
        report: Reporter,
        probe: Probe,
        *,
        progress: ProgressReporter | None = None,
        stop_grace: float = STOP_GRACE,
    ) -> None:
        """`logs`: an existing folder for a log file per service."""
        # Of a gateway and those that take its place: streams can be taken up after its death. A key that is given wins.
        environ = {RESUME_KEY: secrets.token_hex(32), **os.environ}
        self._children = [Child(each, logs / f"{each.name}.log", environ) for each in plan.services]
        self._report = report
        self._probe = probe
        self._progress = progress
        self._stop_grace = stop_grace

    def pids(self) -> dict[str, int]:
        """Return the process ids by service."""
        return {child.name: child.pid for child in self._children if child.pid is not None}

    async def start(self) -> None:
        """Start all services and return when each serves. Raises StartError when one ends before that."""
        self._report(f"starting {', '.join(child.name for child in self._children)}")
        news = started = self._now()
        views = {child: _StartView(child, self._report, self._progress) for child in self._children}
        # Executors first: they take longest.
        for child in reversed(self._children):
            await child.start()
        waiting: dict[asyncio.Task[Any], Child] = {
            asyncio.create_task(self._probe(child.plan.address)): child for child in self._children
        }
        deaths: dict[asyncio.Task[Any], Child] = {asyncio.create_task(child.wait()): child for child in self._children}
        try:
            while waiting:
                done, _ = await asyncio.wait([*waiting, *deaths], timeout=LOOK, return_when=asyncio.FIRST_COMPLETED)
                # Stages before the end they lead to.
                told = [view.show() for view in views.values()]
                for task in done:
                    if task in deaths:
                        raise StartError(deaths[task].last_words())
                    task.result()
                    self._report(f"{waiting.pop(task).name} serves after {self._now() - started:.1f} s")
                if done or any(told):
                    news = self._now()
                elif self._now() - news >= REMINDER:
                    news = self._now()
                    names = ", ".join(f"{child.name}{views[child].progress}" for child in waiting.values())
                    self._report(f"still waiting for {names} after {news - started:.0f} s")
        finally:
            await _cancel([*waiting, *deaths])

    async def run(self) -> None:
        """Start again whatever dies. Never returns; cancel it, then `stop`. Raises what `report` raises."""
        try:
            async with asyncio.TaskGroup() as group:
                for child in self._children:
                    group.create_task(self._keep(child))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def stop(self) -> None:
        """Stop gateway, scheduler and executors in this order: nobody new comes in, then nothing new is computed."""
        for group in (self._children[:1], self._children[1:2], self._children[2:]):
            ended = await asyncio.gather(*(child.stop(self._stop_grace) for child in group))
            for child, in_time in zip(group, ended, strict=True):
                if not in_time:
                    self._report(f"{child.name} did not end within {self._stop_grace:.0f} s and was killed")

    def kill(self) -> None:
        """End what still runs at once."""
        for child in self._children:
            child.kill()

    async def _keep(self, child: Child) -> None:
        pause = FIRST_PAUSE
        started = self._now()
        while True:
            await child.wait()
            pause = FIRST_PAUSE if self._now() - started > STEADY else pause
            self._report(child.last_words())
            is_started = False
            while not is_started:
                self._report(f"starting {child.name} again in {pause:g} s")
                await asyncio.sleep(pause)
                pause = min(2 * pause, LAST_PAUSE)
                try:
                    await child.start()
                    is_started = True
                except OSError as error:
                    # No memory or descriptor for another process now, when it was perhaps for want of it that one died.
                    self._report(f"{child.name} could not be started: {error.strerror}")
            started = self._now()
            await self._announce(child)

    async def _announce(self, child: Child) -> None:
        """Say that a service is back, unless it dies again first."""
        serving, death = asyncio.create_task(self._probe(child.plan.address)), asyncio.create_task(child.wait())
        try:
            await asyncio.wait([serving, death], return_when=asyncio.FIRST_COMPLETED)
            if not death.done():
                self._report(f"{child.name} is back")
        finally:
            await _cancel([serving, death])

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


class _StartView:
    """Shows the stages of one service's start."""

    def __init__(self, child: Child, report: Reporter, progress: ProgressReporter | None) -> None:
        self._name = child.name
        self._log = StartLog(child.log)
        self._report = report
        self._to_bar = progress
        self._last: StageProgress | None = None

    @property
    def progress(self) -> str:
        """How far a long stage has come, in parentheses; empty where there is none."""
        last = self._last
        return "" if last is None else f" ({last.stage} {100 * last.done // max(1, last.total)} %)"

    def show(self) -> bool:
        """Show what is new. Returns whether a line was shown."""
        told = False
        for event in self._log.news():
            if isinstance(event, StageProgress):
                self._last = event
                self._bar(event.stage, event.done, event.total)
                continue
            if self._last is not None:
                self._bar(self._last.stage, self._last.total, self._last.total)
                self._last = None
            self._report(f"  {self._name:11} {event.stage:12} {event.seconds:5.2f} s")
            told = True
        return told

    def _bar(self, stage: str, done: int, total: int) -> None:
        if self._to_bar is not None:
            self._to_bar(f"{self._name} {stage}", done, total)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
