"""A cell for as long as something uses it: start, use, stop in order, whatever ends the use."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from octavo.local.plan import CellPlan
from octavo.local.supervisor import Probe, ProgressReporter, Reporter, Supervisor

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Use = Callable[[], Coroutine[Any, Any, None]]


async def run_cell(
    plan: CellPlan,
    logs: Path,
    report: Reporter,
    use: Use,
    *,
    progress: ProgressReporter | None = None,
    probe: Probe | None = None,
) -> bool:
    """Start the cell, run `use`, and stop the cell when it returns, raises or a signal comes.

    `progress` hears of long stages of the start; `probe` replaces the usual way to ask for health.

    Returns False where SIGINT, SIGTERM or SIGHUP ended the use; a second signal kills the services instead of waiting
    for them. Raises StartError, and what `use` raises.
    """
    supervisor = Supervisor(plan, logs, report, probe or _wait_until_serving, progress=progress)
    work = asyncio.create_task(_work(supervisor, use))
    signals: list[None] = []

    def on_signal() -> None:
        signals.append(None)
        if len(signals) == 1:
            work.cancel()
        else:
            supervisor.kill()

    loop = asyncio.get_running_loop()
    for signum in _SIGNALS:
        loop.add_signal_handler(signum, on_signal)
    try:
        try:
            await work
        except asyncio.CancelledError:
            if not signals:
                raise
        report("stopping")
        return not signals
    finally:
        await supervisor.stop()
        for signum in _SIGNALS:
            loop.remove_signal_handler(signum)


async def _work(supervisor: Supervisor, use: Use) -> None:
    await supervisor.start()
    keeping, using = asyncio.create_task(supervisor.run()), asyncio.create_task(use())
    try:
        done, _ = await asyncio.wait([keeping, using], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (keeping, using):
            task.cancel()
        await asyncio.gather(keeping, using, return_exceptions=True)


async def _wait_until_serving(address: str) -> None:
    # Imported here since gRPC takes a while to import, and the services start meanwhile.
    from octavo.local.probe import wait_until_serving

    await wait_until_serving(address)
