"""Which processes make a cell on one machine, with which flags and ports."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from octavo.models.prepared import PreparedModel
from octavo.rpc.settings import Settings, SettingsError, SettingsType, fields_of, read, variable_of
from octavo.settings import ExecutorSettings, GatewaySettings, SchedulerSettings, known_variables

_KV_SHARE = 0.5
"""Share of the free memory that goes to KV blocks where several executors divide it; weights come on top."""
_LOOPBACK = "127.0.0.1"
_WILDCARDS = {"0.0.0.0": _LOOPBACK, "[::]": "[::1]", "::": "[::1]"}


class PlanError(Exception):
    """The cell cannot be started as asked; the message names the flag."""


@dataclass(frozen=True)
class ServicePlan:
    """One process: what to run, and the host:port at which its health is asked."""

    name: str
    command: tuple[str, ...]
    address: str


@dataclass(frozen=True)
class CellPlan:
    """The processes of a cell, in the order in which they stop. The first is the gateway."""

    services: tuple[ServicePlan, ...]

    @property
    def gateway_address(self) -> str:
        """Where clients on this machine connect."""
        return self.services[0].address


@dataclass(frozen=True)
class PlanOptions:
    """What the user chose. A port that is None is the service's own default or variable; 0 picks a free one.

    `extra` holds further flags by settings field ("max_num_seqs": "8"), for whichever service has that field. Executor
    i listens on `executor_port` + i.
    """

    num_executors: int = 1
    gateway_port: int | None = None
    scheduler_port: int | None = None
    executor_port: int | None = None
    bind: str | None = None
    extra: Mapping[str, str] = dataclasses.field(default_factory=dict)


def plan_cell(model: PreparedModel, options: PlanOptions, environ: Mapping[str, str] | None = None) -> CellPlan:
    """Return the processes that serve `model`, every flag checked and every port free.

    Raises PlanError: a bad flag or variable by its name, a taken port by its number and flag.
    """
    environ = os.environ if environ is None else environ
    named = ["--model", str(model.path)]
    gateway_flags = [*_given(GatewaySettings, options), *named]
    if options.bind is not None:
        gateway_flags += ["--bind", options.bind]
    scheduler_flags = [*_given(SchedulerSettings, options), "--bind", _LOOPBACK]
    executor_flags = [*_given(ExecutorSettings, options), *named, "--bind", _LOOPBACK]
    executor_flags += _shares(options, environ)
    # Read here as the services will read them: what is wrong is said before anything starts.
    gateway = _read(GatewaySettings, gateway_flags, environ)
    scheduler = _read(SchedulerSettings, scheduler_flags, environ)
    executor = _read(ExecutorSettings, executor_flags, environ)
    first_port = _first(options.executor_port, executor.port)
    with ExitStack() as held:
        gateway_port = _claim(held, gateway.bind, _first(options.gateway_port, gateway.port), "--gateway-port")
        scheduler_port = _claim(held, _LOOPBACK, _first(options.scheduler_port, scheduler.port), "--scheduler-port")
        executor_ports = [
            _claim(held, _LOOPBACK, first_port and first_port + index, "--executor-port")
            for index in range(options.num_executors)
        ]
    executors = [f"{_LOOPBACK}:{port}" for port in executor_ports]
    scheduler_address = f"{_LOOPBACK}:{scheduler_port}"
    gateway_flags += ["--scheduler", scheduler_address, "--port", str(gateway_port)]
    scheduler_flags += ["--executors", ",".join(executors), "--port", str(scheduler_port)]
    return CellPlan(
        (
            _service("gateway", "gateway", gateway_flags, f"{_reachable(gateway.bind)}:{gateway_port}"),
            _service("scheduler", "scheduler_svc", scheduler_flags, scheduler_address),
            *(
                _service(f"executor-{index}", "executor_svc", [*executor_flags, "--port", str(port)], executors[index])
                for index, port in enumerate(executor_ports)
            ),
        )
    )


def _service(name: str, module: str, flags: Sequence[str], address: str) -> ServicePlan:
    return ServicePlan(name, (sys.executable, "-m", module, *flags), address)


def _read(settings_class: type[SettingsType], flags: Sequence[str], environ: Mapping[str, str]) -> SettingsType:
    try:
        return read(settings_class, flags, environ, known_variables())
    except SettingsError as error:
        raise PlanError(str(error)) from None


def _given(settings_class: type[Settings], options: PlanOptions) -> list[str]:
    """Return the user's further flags that this service knows."""
    fields = {each.name for each in fields_of(settings_class)}
    return [
        text
        for name, value in options.extra.items()
        if name in fields
        for text in (f"--{name.replace('_', '-')}", value)
    ]


def _shares(options: PlanOptions, environ: Mapping[str, str]) -> list[str]:
    """Divide the machine among several executors: each would take all cores and most of the free memory."""
    if options.num_executors == 1:
        return []
    flags = []
    if "threads" not in options.extra and variable_of(ExecutorSettings, "threads") not in environ:
        flags += ["--threads", str(max(1, (os.cpu_count() or 1) // options.num_executors))]
    if "kv_memory" not in options.extra and variable_of(ExecutorSettings, "kv_memory") not in environ:
        flags += ["--kv-memory", str(int(_available_memory() * _KV_SHARE / options.num_executors))]
    return flags


def _available_memory() -> int:
    """Return the bytes that programs can still take, by /proc/meminfo (proc(5))."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _claim(held: ExitStack, host: str, port: int, flag: str) -> int:
    """Return `port`, or a free one for 0, and hold it until the plan is made, so that no two services get the same."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    claim = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
    # Connections that ended a moment ago do not count; a listener does.
    claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        claim.bind((host.strip("[]"), port))
        claim.listen()
    except OverflowError:
        raise PlanError(f"{flag}: {port} is no port, they end at 65535") from None
    except OSError as error:
        raise PlanError(
            f"cannot listen on {host}:{port} ({error.strerror}): stop what uses it, or choose another with {flag} "
            "(0 picks a free one)"
        ) from None
    return int(claim.getsockname()[1])


def _reachable(bind: str) -> str:
    return _WILDCARDS.get(bind, bind)
