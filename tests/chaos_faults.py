"""Schedules of faults: which service dies, stops or is cut off when, drawn by a seed, and how that is done."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from dataclasses import dataclass

from chaos_cell import EXECUTORS, GATEWAYS, ChaosCell
from tcp_proxy import DOWN, UP

KINDS = (
    "kill executor",
    "stop executor",
    "drain executor",
    "kill scheduler",
    "kill scheduler twice",
    "second scheduler",
    "drain scheduler",
    "kill gateway",
    "drain gateway",
    "kill scheduler and executor",
    "cut",
    "half-close up",
    "half-close down",
    "swallow up",
    "swallow down",
    "corrupt up",
    "corrupt down",
    "slow",
)
"""Every kind of fault. Those from `cut` on are of a hop, the others of a service."""


@dataclass(frozen=True)
class Fault:
    """One fault: what, to whom, how many seconds after the one before, and how long the service stays away."""

    kind: str
    target: str
    after: float
    away: float


@dataclass(frozen=True)
class Done:
    """A fault as it was done: seconds since the start of the schedule."""

    kind: str
    target: str
    at: float


def draw_faults(seed: int, seconds: float, kinds: tuple[str, ...] = KINDS, pause: float = 2.0) -> list[Fault]:
    """Return the faults of so many seconds, about one in `pause` seconds; every kind comes before any comes again."""
    draw = random.Random(seed * 1_000_003 + 1)
    faults: list[Fault] = []
    left: list[str] = []
    at = 0.0
    while True:
        after = draw.uniform(0.5, 1.5) * pause
        at += after
        if at > seconds:
            return faults
        if not left:
            left = draw.sample(kinds, len(kinds))
        kind = left.pop()
        faults.append(Fault(kind, draw.choice(targets_of(kind)), after, draw.uniform(0.0, 1.0)))


def targets_of(kind: str) -> tuple[str, ...]:
    """Return who can have a fault of a kind."""
    if "executor" in kind:
        return EXECUTORS
    if "gateway" in kind:
        return GATEWAYS
    if "scheduler" in kind:
        return ("scheduler",)
    hops = (*EXECUTORS, *(f"{name}>scheduler" for name in GATEWAYS))
    # Upwards nothing but TLS guards a client's headers, which name the method, the deadline and the key.
    return hops if kind == "corrupt up" else (*hops, *GATEWAYS)


class Faults:
    """Does faults to a cell, one after the other, and puts the cell right again behind them."""

    def __init__(self, cell: ChaosCell) -> None:
        self._cell = cell
        self._repairs: set[asyncio.Task[None]] = set()
        self.done: list[Done] = []

    async def run(self, faults: list[Fault]) -> None:
        """Do all faults at their times, then wait for the repairs."""
        start = time.monotonic()
        for fault in faults:
            await asyncio.sleep(fault.after)
            self.done.append(Done(fault.kind, fault.target, round(time.monotonic() - start, 2)))
            await self.do(fault)
        await self.repaired()

    async def repaired(self) -> None:
        """Wait until everything that was killed or stopped has been started or woken."""
        while self._repairs:
            await asyncio.gather(*self._repairs)

    async def do(self, fault: Fault) -> None:
        """Do one fault; what follows of it (a new start, a wake-up) goes on beside."""
        cell = self._cell
        target = cell.scheduler if fault.target == "scheduler" else fault.target
        match fault.kind:
            case "kill executor" | "kill scheduler" | "kill gateway":
                cell.signal(target, signal.SIGKILL)
                self._later(self._restart(target, fault.away))
            case "kill scheduler twice":
                cell.signal(target, signal.SIGKILL)
                self._later(self._kill_again(target, fault.away))
            case "kill scheduler and executor":
                for name in (target, cell.scheduler):
                    cell.signal(name, signal.SIGKILL)
                    self._later(self._restart(name, fault.away))
            case "drain executor" | "drain scheduler" | "drain gateway":
                cell.signal(target, signal.SIGTERM)
                self._later(self._restart(target, fault.away))
            case "stop executor":
                if target not in cell.stopped:
                    cell.stopped.add(target)
                    cell.signal(target, signal.SIGSTOP)
                    self._later(self._wake(target, 2.0 + 3.0 * fault.away))
            case "second scheduler":
                earlier = cell.switch_scheduler()
                self._later(self._retire(earlier))
            case "cut":
                cell.proxies[target].cut()
            case "half-close up":
                cell.proxies[target].half_close(UP)
            case "half-close down":
                cell.proxies[target].half_close(DOWN)
            case "swallow up" | "swallow down" if target in GATEWAYS:
                # A client that hears nothing waits for its own timeout: here the connection ends soon after.
                cell.proxies[target].swallow(UP if fault.kind.endswith("up") else DOWN)
                self._later(self._cut(target, fault.away))
            case "swallow up":
                cell.proxies[target].swallow(UP)
            case "swallow down":
                cell.proxies[target].swallow(DOWN)
            case "corrupt up":
                cell.proxies[target].corrupt(UP, 3)
            case "corrupt down":
                cell.proxies[target].corrupt(DOWN, 3)
            case "slow":
                self._later(self._slow(target, fault.away))
            case other:
                raise ValueError(f"no fault is called {other!r}")

    def _later(self, coroutine: object) -> None:
        task = asyncio.ensure_future(coroutine)  # type: ignore[arg-type]
        self._repairs.add(task)
        task.add_done_callback(self._repairs.discard)

    async def _restart(self, name: str, after: float) -> None:
        await self._cell.wait_exit(name)
        await asyncio.sleep(after)
        if name.startswith("scheduler") and name != self._cell.scheduler:
            return
        self._cell.start_service(name)

    async def _kill_again(self, name: str, after: float) -> None:
        await self._restart(name, 0.0)
        await asyncio.sleep(after)
        self._cell.signal(name, signal.SIGKILL)
        await self._restart(name, 0.0)

    async def _wake(self, name: str, after: float) -> None:
        await asyncio.sleep(after)
        self._cell.signal(name, signal.SIGCONT)
        self._cell.stopped.discard(name)

    async def _retire(self, earlier: str) -> None:
        """Wait until the older of two schedulers has found out by itself, which is what it must do."""
        with contextlib.suppress(KeyError):
            await self._cell.wait_exit(earlier)

    async def _cut(self, target: str, after: float) -> None:
        await asyncio.sleep(after)
        self._cell.proxies[target].cut()

    async def _slow(self, target: str, seconds: float) -> None:
        proxy = self._cell.proxies[target]
        for direction in (UP, DOWN):
            proxy.delay(direction, 0.05)
        await asyncio.sleep(1.0 + seconds)
        for direction in (UP, DOWN):
            proxy.delay(direction, 0.0)
