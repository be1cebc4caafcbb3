"""The same cell in two forms: three servers in this process, or as processes of their own. Tests do not care which."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Protocol

import grpc.aio
from cell_of_tests import CELL
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ports import take_ports

from executor_svc.server import ExecutorServer
from gateway.scheduler_client import Backoff
from gateway.server import GatewayServer
from octavo.internal.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from octavo.local.plan import CellPlan, PlanOptions, plan_cell
from octavo.models.prepared import PreparedModel
from octavo.rpc.channel import open_channel
from octavo.rpc.settings import SettingsType, fields_of, read
from octavo.settings import ExecutorSettings, GatewaySettings, SchedulerSettings
from scheduler_svc.server import SchedulerServer

TIMEOUT = 60.0
FLAGS = {
    "cell": CELL,
    "dtype": "float32",
    "threads": "1",
    "check_invariants": "true",
    "kv_memory": "8MiB",
    "log_level": "warning",
    "metrics_port": "0",
    "http_port": "0",
    "admin_port": "0",
    "drain_grace": "0",
}
"""What every cell of the tests is started with, by settings field; a test adds to it."""


class Stack(Protocol):
    """A running cell."""

    model: PreparedModel

    @property
    def gateway_address(self) -> str:
        """Where clients connect."""

    @property
    def http_address(self) -> str:
        """Where OpenAI clients connect."""

    @property
    def admin_address(self) -> str:
        """Where the gateway serves operators."""

    @property
    def scheduler_address(self) -> str:
        """Where GetLoad is answered."""

    def metrics_address(self, name: str) -> str:
        """Where a service's metrics page is: gateway, scheduler, executor-0, ..."""


async def get_load(stack: Stack) -> scheduler_pb2.GetLoadResponse:
    """Ask the scheduler what is waiting and running and who holds the blocks."""
    async with open_channel(stack.scheduler_address) as channel:
        return await scheduler_pb2_grpc.SchedulerServiceStub(channel).GetLoad(scheduler_pb2.GetLoadRequest())


async def wait_idle(stack: Stack) -> scheduler_pb2.GetLoadResponse:
    """Wait until nothing is live and every ledger is empty; fails after TIMEOUT with the load that remains."""
    async with asyncio.timeout(TIMEOUT), open_channel(stack.scheduler_address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        while True:
            load = await stub.GetLoad(scheduler_pb2.GetLoadRequest())
            held = sum(each.owned_blocks for each in load.executors)
            if not (load.num_requests or load.num_waiting or load.num_running or held):
                return load
            await asyncio.sleep(0.01)


async def wait_serving(address: str, service: str = "", *, serving: bool = True) -> None:
    """Watch the health of `address` until it is as wanted; an address nobody listens on yet is waited for."""
    wanted = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    async with asyncio.timeout(TIMEOUT), open_channel(address) as channel:
        while True:
            call = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(service=service), wait_for_ready=True
            )
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for response in call:
                    if response.status == wanted:
                        call.cancel()  # or a task of grpc's would wait for its status
                        return


@dataclasses.dataclass
class InProcessStack:
    """Three servers on the running event loop."""

    model: PreparedModel
    gateway: GatewayServer
    scheduler: SchedulerServer
    executors: list[ExecutorServer]

    @property
    def gateway_address(self) -> str:
        """Where clients connect."""
        return f"127.0.0.1:{self.gateway.port}"

    @property
    def http_address(self) -> str:
        """Where OpenAI clients connect."""
        return f"127.0.0.1:{self.gateway.http_port}"

    @property
    def admin_address(self) -> str:
        """Where the gateway serves operators."""
        return f"127.0.0.1:{self.gateway.admin_port}"

    @property
    def scheduler_address(self) -> str:
        """Where GetLoad is answered."""
        return f"127.0.0.1:{self.scheduler.port}"

    def metrics_address(self, name: str) -> str:
        """Where a service's metrics page is."""
        executors = {f"executor-{index}": executor for index, executor in enumerate(self.executors)}
        server = {"gateway": self.gateway, "scheduler": self.scheduler, **executors}[name]
        return f"127.0.0.1:{server.metrics_port}"


@contextlib.asynccontextmanager
async def in_process(
    model: PreparedModel, *, num_executors: int = 1, flags: Mapping[str, str] | None = None
) -> AsyncIterator[InProcessStack]:
    """Start a cell in this process; stop it in the order of a shutdown. No task and no device thread outlives it."""
    given = {**FLAGS, **(flags or {})}
    tasks_before, threads_before = asyncio.all_tasks(), set(threading.enumerate())
    async with contextlib.AsyncExitStack() as stack:
        executors = []
        for _ in range(num_executors):
            executor = ExecutorServer(_settings(ExecutorSettings, given, model=str(model.path), port="0"))
            await executor.start()
            stack.push_async_callback(executor.stop)
            executors.append(executor)
        addresses = ",".join(f"127.0.0.1:{executor.port}" for executor in executors)
        scheduler = SchedulerServer(_settings(SchedulerSettings, given, executors=addresses, port="0"))
        await scheduler.start()
        stopped = asyncio.Event()
        running = asyncio.create_task(scheduler.run(stopped.wait()))

        async def stop_scheduler() -> None:
            stopped.set()
            assert await running == 0, "the scheduler failed"

        stack.push_async_callback(stop_scheduler)
        address = f"127.0.0.1:{scheduler.port}"
        settings = _settings(GatewaySettings, given, model=str(model.path), scheduler=address, port="0")
        gateway = GatewayServer(settings, [model], Backoff(initial=0.02, maximum=0.2))
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        await wait_serving(f"127.0.0.1:{gateway.port}")
        yield InProcessStack(model, gateway, scheduler, executors)
    # A fixture ends in another task than it began in.
    left = asyncio.all_tasks() - tasks_before - {asyncio.current_task()}
    if left:
        await asyncio.wait(left, timeout=TIMEOUT)
    assert not [task for task in left if not task.done()]
    assert "device" not in {each.name for each in set(threading.enumerate()) - threads_before}


@contextlib.asynccontextmanager
async def another_gateway(stack: Stack) -> AsyncIterator[GatewayServer]:
    """Attach a second gateway to a running cell of either form; it runs in this process."""
    address = stack.scheduler_address
    settings = _settings(GatewaySettings, FLAGS, model=str(stack.model.path), scheduler=address, port="0")
    gateway = GatewayServer(settings, [stack.model], Backoff(initial=0.02, maximum=0.2))
    await gateway.start()
    try:
        await wait_serving(f"127.0.0.1:{gateway.port}")
        yield gateway
    finally:
        await gateway.stop()


class ProcessStack:
    """Each service a process of its own, as `octavo up` starts them, without a supervisor: who is killed stays dead."""

    def __init__(self, model: PreparedModel, plan: CellPlan, logs: Path) -> None:
        self.model = model
        self._plan = plan
        self._logs = logs
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def gateway_address(self) -> str:
        """Where clients connect."""
        return self._plan.gateway_address

    @property
    def http_address(self) -> str:
        """Where OpenAI clients connect."""
        return self._plan.http_address

    @property
    def admin_address(self) -> str:
        """Where the gateway serves operators."""
        return self._plan.admin_address

    @property
    def scheduler_address(self) -> str:
        """Where GetLoad is answered."""
        return self.address("scheduler")

    def address(self, name: str) -> str:
        """Where a service listens: gateway, scheduler, executor-0, ..."""
        return next(service.address for service in self._plan.services if service.name == name)

    def metrics_address(self, name: str) -> str:
        """Where a service's metrics page is."""
        return next(service.metrics_address for service in self._plan.services if service.name == name)

    def use_executors_of(self, other: ProcessStack) -> None:
        """Have this cell's scheduler dial the executors of another: a second scheduler for the same cell."""
        addresses = ",".join(each.address for each in other._plan.services if each.name.startswith("executor"))
        services = []
        for service in self._plan.services:
            command = list(service.command)
            if service.name == "scheduler":
                command[command.index("--executors") + 1] = addresses
            services.append(dataclasses.replace(service, command=tuple(command)))
        self._plan = dataclasses.replace(self._plan, services=tuple(services))

    def use_torchrun(self, name: str, port: int) -> str:
        """Have two agents of torchrun, as of two machines, start an executor's two ranks; the executor's name is the
        first agent's. Returns the other agent's. `port`: where they meet.
        """
        plan = next(service for service in self._plan.services if service.name == name)
        other = f"{name}-other"
        meet = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port))
        agents = [
            dataclasses.replace(
                plan,
                name=each,
                command=(
                    *(sys.executable, "-m", "torch.distributed.run", *meet),
                    *("--node-rank", str(number), "--no-python", *plan.command),
                ),
            )
            for number, each in enumerate((name, other))
        ]
        others = [service for service in self._plan.services if service.name != name]
        self._plan = dataclasses.replace(self._plan, services=(*others, *agents))
        return other

    def start(self, name: str) -> None:
        """Start a service, for the first time or again."""
        command = next(service.command for service in self._plan.services if service.name == name)
        with (self._logs / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def start_all(self) -> None:
        """Start every service."""
        for service in self._plan.services:
            self.start(service.name)

    def signal(self, name: str, signum: signal.Signals) -> None:
        """Send a signal to a service."""
        self.processes[name].send_signal(signum)

    async def wait_exit(self, name: str) -> int:
        """Wait for the end of a service and return its exit code; negative: the signal that killed it."""
        async with asyncio.timeout(TIMEOUT):
            return await asyncio.to_thread(self.processes[name].wait)

    def log_of(self, name: str) -> str:
        """What a service has logged."""
        return (self._logs / f"{name}.log").read_text()

    def stop_all(self) -> dict[str, int]:
        """Ask every living service to stop and return all exit codes."""
        for service in self._plan.services:
            process = self.processes.get(service.name)
            if process is None:
                continue
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
            try:
                process.wait(TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return {name: process.returncode for name, process in self.processes.items()}


def plan_processes(
    model: PreparedModel, logs: Path, *, num_executors: int = 1, flags: Mapping[str, str] | None = None
) -> ProcessStack:
    """Plan a cell of processes on free ports; nothing is started yet."""
    first = take_ports(4 + 2 + 2 * num_executors)[0]
    other = first + num_executors
    options = PlanOptions(
        num_executors=num_executors,
        executor_port=first,
        gateway_port=other,
        scheduler_port=other + 1,
        admin_port=other + 2,
        http_port=other + 3,
        metrics_port=other + 4,
        extra={**FLAGS, **(flags or {})},
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
    return ProcessStack(model, plan_cell(model, options, environ), logs)


@contextlib.asynccontextmanager
async def processes(
    model: PreparedModel, logs: Path, *, num_executors: int = 1, flags: Mapping[str, str] | None = None
) -> AsyncIterator[ProcessStack]:
    """Start a cell of processes and wait until it serves; end whatever of it still lives."""
    stack = plan_processes(model, logs, num_executors=num_executors, flags=flags)
    stack.start_all()
    try:
        await wait_serving(stack.gateway_address)
        yield stack
    finally:
        stack.stop_all()


def _settings(settings_class: type[SettingsType], flags: Mapping[str, str], **own: str) -> SettingsType:
    fields = {each.name for each in fields_of(settings_class)}
    values = {name: value for name, value in {**flags, **own}.items() if name in fields}
    argv = [text for name, value in values.items() for text in (f"--{name.replace('_', '-')}", value)]
    return read(settings_class, argv, {}, frozenset())
