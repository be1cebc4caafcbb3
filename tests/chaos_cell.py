"""A cell of processes with a proxy on every hop, for those who break it: two gateways, a scheduler, two executors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from cell_of_tests import CELL
from ports import take_ports
from tcp_proxy import TcpProxy

from executor_svc.kernels.native.build import BUILT_AHEAD_IN
from octavo.internal.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from octavo.local.probe import wait_until_serving
from octavo.models.prepared import PreparedModel
from octavo.rpc.channel import open_channel

TIMEOUT = 90.0
GATEWAYS = ("gateway-0", "gateway-1")
EXECUTORS = ("executor-0", "executor-1")
MORE_EXECUTORS = ("executor-2", "executor-3")
SCHEDULERS = ("scheduler-0", "scheduler-1")
FLAGS = {
    "gateway": {"check-invariants": "true", "drain-grace": "2", "stall-timeout": "6", "log-level": "info"},
    "scheduler_svc": {
        "check-invariants": "true",
        "hang-timeout": "2",
        "stall-timeout": "6",
        "gateway-grace": "2",
        "orphan-timeout": "120",
        "log-level": "info",
    },
    # Few blocks, so that preemption happens; steps of few tokens, so that deaths come in the middle of a prefill.
    "executor_svc": {
        "check-invariants": "true",
        "dtype": "float32",
        "threads": "1",
        "kv-memory": "1MiB",
        "max-num-batched-tokens": "64",
        "log-level": "info",
    },
}


class ChaosCell:
    """The processes, by name, and the proxies: before each gateway, each executor, and each gateway's scheduler."""

    def __init__(
        self,
        model: PreparedModel,
        logs: Path,
        seed: int = 0,
        flags: Mapping[str, Mapping[str, str]] | None = None,
        num_executors: int = 2,
    ) -> None:
        """`flags`: further ones, by program."""
        self.model = model
        self.executors = (*EXECUTORS, *MORE_EXECUTORS)[:num_executors]
        self._flags = {program: {**each, **(flags or {}).get(program, {})} for program, each in FLAGS.items()}
        self._logs = logs
        names = (*GATEWAYS, *(f"{name} http" for name in GATEWAYS), *SCHEDULERS, *self.executors)
        self._ports = dict(zip(names, take_ports(len(names)), strict=True))
        self._environ = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
        self._environ |= {"OCTAVO_RESUME_KEY": secrets.token_hex(16), "OCTAVO_CELL": f"{CELL}-{secrets.token_hex(4)}"}
        if BUILT_AHEAD_IN in os.environ:
            self._environ[BUILT_AHEAD_IN] = os.environ[BUILT_AHEAD_IN]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.stopped: set[str] = set()
        self.scheduler = SCHEDULERS[0]
        self.proxies: dict[str, TcpProxy] = {}
        for name in (*GATEWAYS, *self.executors):
            self.proxies[name] = TcpProxy(self.address(name), seed)
        for name in GATEWAYS:
            self.proxies[f"{name}>scheduler"] = TcpProxy(self.address(self.scheduler), seed)

    def address(self, name: str) -> str:
        """Where a service listens, without a proxy before it."""
        return f"127.0.0.1:{self._ports[name]}"

    def http_url(self, gateway: str) -> str:
        """Where a gateway serves HTTP."""
        return f"http://127.0.0.1:{self._ports[f'{gateway} http']}"

    @property
    def client_addresses(self) -> list[str]:
        """Where clients connect."""
        return [self.proxies[name].address for name in GATEWAYS]

    async def start(self) -> None:
        """Start everything and wait until all executors are in session."""
        for proxy in self.proxies.values():
            await proxy.start()
        for name in (*self.executors, self.scheduler, *GATEWAYS):
            self.start_service(name)
        await self.wait_whole()

    def start_service(self, name: str) -> None:
        """Start a service, for the first time or again; nothing happens where it runs."""
        running = self.processes.get(name)
        if running is not None and running.poll() is None:
            return
        with (self._logs / f"{name}.log").open("ab") as log:
            command = self._command(name)
            self.processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=self._environ, start_new_session=True
            )

    def signal(self, name: str, signum: signal.Signals) -> None:
        """Send a signal to a service that runs."""
        process = self.processes.get(name)
        if process is not None and process.poll() is None:
            process.send_signal(signum)

    async def wait_exit(self, name: str) -> int:
        """Wait for the end of a service and return its exit code; negative: the signal that killed it."""
        async with asyncio.timeout(TIMEOUT):
            return await asyncio.to_thread(self.processes[name].wait)

    def switch_scheduler(self) -> str:
        """Start a second scheduler for the cell and lead gateways that connect to it; returns the name of the first.

        The first is not told: it finds out by the executors.
        """
        earlier = self.scheduler
        self.scheduler = next(name for name in SCHEDULERS if name != earlier)
        self.start_service(self.scheduler)
        for name in GATEWAYS:
            self.proxies[f"{name}>scheduler"].target = self.address(self.scheduler)
        return earlier

    async def wait_whole(self) -> None:
        """Start what is dead and wait until all executors are in session and both gateways serve."""
        for name in self.stopped:
            self.signal(name, signal.SIGCONT)
        self.stopped.clear()
        for name in (*self.executors, self.scheduler, *GATEWAYS):
            self.start_service(name)
        async with asyncio.timeout(TIMEOUT):
            for name in GATEWAYS:
                await wait_until_serving(self.address(name))
            while len((await self.load()).executors) < len(self.executors):
                await asyncio.sleep(0.05)

    async def load(self) -> scheduler_pb2.GetLoadResponse:
        """Ask the scheduler who holds what."""
        async with open_channel(self.address(self.scheduler)) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            return await stub.GetLoad(scheduler_pb2.GetLoadRequest(), timeout=10, wait_for_ready=True)

    async def wait_idle(self, seconds: float) -> scheduler_pb2.GetLoadResponse:
        """Wait until nothing is live and no block is held, or so long; return the load then."""
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            load = await self.load()
            busy = load.num_requests or load.num_waiting or load.num_running or leaked_blocks(load)
            if not busy or asyncio.get_running_loop().time() > deadline:
                return load
            await asyncio.sleep(0.05)

    def states(self) -> dict[str, str]:
        """Return what each service is now: up, dead or stopped; a scheduler that was replaced is left out."""
        states = {}
        for name in (*GATEWAYS, self.scheduler, *self.executors):
            process = self.processes.get(name)
            is_dead = process is None or process.poll() is not None
            states[name] = "dead" if is_dead else "stopped" if name in self.stopped else "up"
        return states

    def log_of(self, name: str) -> str:
        """What a service has logged."""
        file = self._logs / f"{name}.log"
        return file.read_text() if file.exists() else ""

    def stop(self) -> None:
        """End every process."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
        for process in self.processes.values():
            process.wait()

    def _command(self, name: str) -> list[str]:
        module = {"g": "gateway", "s": "scheduler_svc", "e": "executor_svc"}[name[0]]
        flags = self._flags[module] | {"port": str(self._ports[name]), "metrics-port": "0"}
        if module == "gateway":
            flags |= {"model": str(self.model.path), "admin-port": "0"}
            flags |= {"http-port": str(self._ports[f"{name} http"])}
            flags |= {"scheduler": self.proxies[f"{name}>scheduler"].address}
        elif module == "scheduler_svc":
            flags |= {"executors": ",".join(self.proxies[each].address for each in self.executors)}
        else:
            flags |= {"model": str(self.model.path)}
        return [sys.executable, "-m", module, *(text for flag, value in flags.items() for text in (f"--{flag}", value))]


def leaked_blocks(load: scheduler_pb2.GetLoadResponse) -> int:
    """Return how many blocks are neither free nor cached."""
    return sum(each.total_blocks - each.free_blocks - each.cached_blocks for each in load.executors)


@contextlib.asynccontextmanager
async def chaos_cell(
    model: PreparedModel,
    logs: Path,
    seed: int = 0,
    flags: Mapping[str, Mapping[str, str]] | None = None,
    num_executors: int = 2,
) -> AsyncIterator[ChaosCell]:
    """Start a cell; end whatever of it still lives. `flags`: further ones, by program."""
    cell = ChaosCell(model, logs, seed, flags, num_executors)
    try:
        await cell.start()
        yield cell
    finally:
        cell.stop()
        for proxy in cell.proxies.values():
            await proxy.stop()
