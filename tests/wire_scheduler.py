"""A scheduler at work in this process, between fake executors and scripted gateways."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from cell_of_tests import CELL
from wire_executor import TIMEOUT, FakeExecutor
from wire_gateway import FakeGateway

from octavo.settings import SchedulerSettings
from scheduler_svc.server import SchedulerServer


class RunningScheduler:
    """A scheduler at work in this process, and the gateways that tests attach to it."""

    def __init__(self, server: SchedulerServer) -> None:
        self.server = server
        self.expected_code = 0
        self.gateways: list[FakeGateway] = []
        self._stop = asyncio.Event()
        self._task = asyncio.ensure_future(server.run(self._stop.wait()))

    @property
    def port(self) -> int:
        return self.server.port

    async def gateway(self, *, attach: bool = True, incarnation: str | None = None) -> FakeGateway:
        """Return a new gateway, attached."""
        gateway = FakeGateway(self.port, incarnation)
        self.gateways.append(gateway)
        if attach:
            await gateway.attach()
        return gateway

    async def ready_gateway(self, num_executors: int = 1) -> FakeGateway:
        """Return a new gateway once this many executors are ready."""
        gateway = await self.gateway()
        await gateway.until_load(lambda load: len(load.executors) == num_executors)
        return gateway

    async def exit_code(self) -> int:
        """Wait for the end."""
        async with asyncio.timeout(TIMEOUT):
            return await asyncio.shield(self._task)

    async def stop(self) -> int:
        """Stop as a signal does."""
        self._stop.set()
        return await self.exit_code()


@contextlib.asynccontextmanager
async def running_scheduler(*executors: FakeExecutor, **options: Any) -> AsyncIterator[RunningScheduler]:
    """Run a scheduler for these executors, which are started; check at the end that nobody found a fault.

    options: those of SchedulerSettings, and the keyword arguments of SchedulerServer.
    """
    names = ("engine", "resolver", "term_patience", "output_limit")
    arguments = {name: options.pop(name) for name in names if name in options}
    for executor in executors:
        await executor.start()
    # Without an executor: a port that nobody listens on.
    addresses = ",".join(executor.address for executor in executors) or "127.0.0.1:1"
    settings: dict[str, Any] = {
        "executors": addresses,
        "cell": CELL,
        "port": 0,
        "metrics_port": 0,
        "check_invariants": True,
        "resolve_interval": 0.05,
    }
    server = SchedulerServer(SchedulerSettings(**(settings | options)), **arguments)
    await server.start()
    scheduler = RunningScheduler(server)
    try:
        yield scheduler
        for party in (*executors, *scheduler.gateways):
            assert party.faults == []
    finally:
        code = await scheduler.stop()
        for gateway in scheduler.gateways:
            await gateway.close()
        for executor in executors:
            await executor.stop()
    assert code == scheduler.expected_code
