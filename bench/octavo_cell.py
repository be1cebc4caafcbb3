"""Octavo as people run it: gateway, scheduler and executor, a process each, started as `octavo up` starts them."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import load
import machine
import uvloop
import workloads
from workloads import Workload

from octavo.bench.target import Target
from octavo.local.plan import CellPlan, PlanError, PlanOptions, plan_cell
from octavo.local.probe import wait_until_serving
from octavo.local.supervisor import StartError, Supervisor
from octavo.models import ModelError
from octavo.models.prepared import PreparedModel

KV_MEMORY = "4GiB"
"""What every engine gets for keys and values, where it can be told."""
_PORTS = dict.fromkeys(
    ("gateway_port", "scheduler_port", "executor_port", "admin_port", "http_port", "metrics_port"), 0
)
_NUM_WARM_UPS = 2
_Result = TypeVar("_Result")


@dataclass
class OctavoCell:
    """A cell that serves. `served` is what the executor says of itself: dtype, kernels, threads, kv_tokens and more."""

    model: PreparedModel
    address: str
    target: Target
    pids: tuple[int, ...]
    start_seconds: float
    served: dict[str, Any]

    @property
    def num_ids(self) -> int:
        """Where the ids of this model's workloads end."""
        return min(workloads.NUM_IDS, self.model.vocab_size)

    async def run(self, workload: Workload) -> dict[str, Any]:
        """Send a workload through the gateway; see load.drive. The peak memory is that of this run."""
        machine.forget_peaks(self.pids)
        figures = await load.drive(self.target, workload)
        return figures | {"peak_rss_mib": machine.peak_rss_mib(self.pids)}

    async def collect(self, workload: Workload) -> dict[str, Any]:
        """The same without streams; see load.collect."""
        machine.forget_peaks(self.pids)
        figures = await load.collect(self.address, workload)
        return figures | {"peak_rss_mib": machine.peak_rss_mib(self.pids)}

    async def warm_up(self) -> None:
        """Let what is made at first use be made."""
        for number in range(_NUM_WARM_UPS):
            await load.drive(self.target, workloads.warm_up(number, num_ids=self.num_ids))


@contextlib.asynccontextmanager
async def open_cell(
    model: PreparedModel, flags: Mapping[str, str], *, executor: Sequence[str] = ()
) -> AsyncIterator[OctavoCell]:
    """Start the three services with further flags by settings field, warm them up, and stop them at the end.

    `executor`: a script and its first arguments, run in place of the executor's own module. Raises PlanError for a bad
    flag, StartError where a service does not come up.
    """
    options = PlanOptions(extra={"kv_memory": KV_MEMORY, **flags}, **_PORTS)  # type: ignore[arg-type]
    plan = _with_executor(plan_cell(model, options), executor)
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as logs:
        supervisor = Supervisor(plan, Path(logs), _say_nothing, wait_until_serving)
        start = time.perf_counter()
        try:
            await supervisor.start()
            start_seconds = time.perf_counter() - start
            target = load.grpc_target(plan.gateway_address)
            try:
                await target.describe()  # the target learns the model's name
                served = _served(Path(logs) / "executor-0.log")
                cell = OctavoCell(
                    model, plan.gateway_address, target, tuple(supervisor.pids().values()), start_seconds, served
                )
                await cell.warm_up()
                yield cell
            finally:
                await target.close()
        finally:
            await supervisor.stop()


def _with_executor(plan: CellPlan, executor: Sequence[str]) -> CellPlan:
    """Return the plan with another program for the executor."""
    if not executor:
        return plan
    services = []
    for service in plan.services:
        python, *module = service.command[:3]
        if module == ["-m", "executor_svc"]:
            service = replace(service, command=(python, *executor, *service.command[3:]))
        services.append(service)
    return replace(plan, services=tuple(services))


def run_blocking(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run on the event loop that `octavo bench` uses. Raises SystemExit with the reason where Octavo did not serve."""
    try:
        return uvloop.run(work)
    except (ModelError, PlanError, StartError, load.WrongOutputError) as error:
        raise SystemExit(f"Octavo was not measured: {error}") from None


def flags_of(settings: list[str], **named: object) -> dict[str, str]:
    """Return flags by settings field, from NAME=VALUE and from what was named and is not None. Raises ValueError."""
    flags = {name: str(value) for name, value in named.items() if value is not None}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set {text}: give NAME=VALUE, as in kv_memory=2GiB")
        flags[name.strip("-").replace("-", "_")] = value
    return flags


def _served(log: Path) -> dict[str, Any]:
    """Return what the executor logged when it began to serve. Raises StartError where it did not."""
    for line in log.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            fields = json.loads(line)
            if isinstance(fields, dict) and "dtype" in fields:
                return fields
    raise StartError(f"{log} does not say what is served: run with log_level info")


def _say_nothing(line: str) -> None:
    """Take a line of progress."""
