"""Which processes make a cell on one machine, with which flags and ports."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from octavo.models.prepared import PreparedModel
from octavo.rpc.settings import Settings, SettingsError, SettingsType, fields_of, read, variable_of
from octavo.settings import (
    PASSES,
    ExecutorSettings,
    GatewaySettings,
    SchedulerSettings,
    known_variables,
    unknown_pass,
)

_KV_SHARE = 0.5
"""Share of the free memory that goes to KV blocks where several executors divide it; weights come on top."""
_LOOPBACK = "127.0.0.1"
_WILDCARDS = {"0.0.0.0": _LOOPBACK, "[::]": "[::1]", "::": "[::1]"}


class PlanError(Exception):
    """The cell cannot be started as asked; the message names the flag, `hint` is the next step where there is one."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class BadSettingError(PlanError):
    """A flag or variable has a value that no machine could start a cell with: bad usage, and no failure."""


@dataclass(frozen=True)
class ServicePlan:
    """One process: what to run, the host:port at which its health is asked, and that of its metrics page."""

    name: str
    command: tuple[str, ...]
    address: str
    metrics_address: str


@dataclass(frozen=True)
class CellPlan:
    """The processes of a cell, in the order in which they stop. The first is the gateway.

    `admin_address` is the host:port of the operator's API, `http_address` that of the OpenAI-compatible one.
    """

    services: tuple[ServicePlan, ...]
    admin_address: str
    http_address: str

    @property
    def gateway_address(self) -> str:
        """Where clients on this machine connect."""
        return self.services[0].address


@dataclass(frozen=True)
class PlanOptions:
    """What the user chose. A port that is None is the service's own default or variable; 0 picks a free one.

    Executors take the ports from `executor_port` on, leaving out those of the rest of the cell. `metrics_port` is the
    gateway's; scheduler and executors take the ports after it. `extra` holds further flags by settings field
    ("max_num_seqs": "8"), for whichever service has that field.
    """

    num_executors: int = 1
    gateway_port: int | None = None
    scheduler_port: int | None = None
    executor_port: int | None = None
    admin_port: int | None = None
    http_port: int | None = None
    metrics_port: int | None = None
    bind: str | None = None
    extra: Mapping[str, str] = dataclasses.field(default_factory=dict)


def check_settings(options: PlanOptions, environ: Mapping[str, str] | None = None) -> None:
    """Read every flag and variable as the services will, before a model is fetched. Raises BadSettingError."""
    environ = os.environ if environ is None else environ
    for settings_class in (GatewaySettings, SchedulerSettings, ExecutorSettings):
        needs_model = any(each.name == "model" for each in fields_of(settings_class))
        given = [*_given(settings_class, options), *(["--model", "any"] if needs_model else [])]
        settings = _read(settings_class, given, environ)
        if isinstance(settings, ExecutorSettings) and (unknown := unknown_pass(settings)):
            raise BadSettingError(f"--passes: {unknown!r} is none of all, none, {', '.join(PASSES)}")


def plan_cell(model: PreparedModel, options: PlanOptions, environ: Mapping[str, str] | None = None) -> CellPlan:
    """Return the processes that serve `model`, every flag checked and every port free.

    Raises BadSettingError with the name of a flag or variable, PlanError with all taken ports and their flags.
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
    _check_length(executor, model, options)
    first_metrics = options.metrics_port
    with _Claims() as claims:
        gateway_port = claims.claim(gateway.bind, _first(options.gateway_port, gateway.port), "--gateway-port")
        admin_port = claims.claim(gateway.bind, _first(options.admin_port, gateway.admin_port), "--admin-port")
        http_port = claims.claim(gateway.bind, _first(options.http_port, gateway.http_port), "--http-port")
        scheduler_port = claims.claim(_LOOPBACK, _first(options.scheduler_port, scheduler.port), "--scheduler-port")
        executor_ports = claims.claim_from(
            _LOOPBACK, _first(options.executor_port, executor.port), options.num_executors, "--executor-port"
        )
        metrics_ports = [
            claims.claim(host, port, "--metrics-port")
            for host, port in [
                (gateway.bind, _offset(first_metrics, 0, gateway.metrics_port)),
                (_LOOPBACK, _offset(first_metrics, 1, scheduler.metrics_port)),
                *(
                    (_LOOPBACK, _offset(first_metrics, 2 + index, executor.metrics_port, index))
                    for index in range(options.num_executors)
                ),
            ]
        ]
        claims.check(gateway.bind, gateway_port)
    executors = [f"{_LOOPBACK}:{port}" for port in executor_ports]
    scheduler_address = f"{_LOOPBACK}:{scheduler_port}"
    gateway_flags += ["--scheduler", scheduler_address, "--admin-port", str(admin_port), "--http-port", str(http_port)]
    scheduler_flags += ["--executors", ",".join(executors)]
    outside = _reachable(gateway.bind)
    return CellPlan(
        (
            _service("gateway", "gateway", gateway_flags, outside, gateway_port, metrics_ports[0]),
            _service("scheduler", "scheduler_svc", scheduler_flags, _LOOPBACK, scheduler_port, metrics_ports[1]),
            *(
                _service(f"executor-{index}", "executor_svc", executor_flags, _LOOPBACK, port, metrics_port)
                for index, (port, metrics_port) in enumerate(zip(executor_ports, metrics_ports[2:], strict=True))
            ),
        ),
        admin_address=f"{outside}:{admin_port}",
        http_address=f"{outside}:{http_port}",
    )


def _service(name: str, module: str, flags: Sequence[str], host: str, port: int, metrics_port: int) -> ServicePlan:
    command = (sys.executable, "-m", module, *flags, "--port", str(port), "--metrics-port", str(metrics_port))
    return ServicePlan(name, command, f"{host}:{port}", f"{host}:{metrics_port}")


def _read(settings_class: type[SettingsType], flags: Sequence[str], environ: Mapping[str, str]) -> SettingsType:
    try:
        return read(settings_class, flags, environ, known_variables())
    except SettingsError as error:
        raise BadSettingError(str(error)) from None


def _check_length(executor: ExecutorSettings, model: PreparedModel, options: PlanOptions) -> None:
    """Refuse sequences beyond the model's end: the executor would, some seconds later."""
    wanted, end = executor.max_model_len, model.max_position_embeddings
    if wanted is not None and wanted > end:
        is_flag = "max_model_len" in options.extra
        source = "--max-model-len" if is_flag else variable_of(ExecutorSettings, "max_model_len")
        raise BadSettingError(
            f"{source}={wanted}: model {model.name} ends at {end} tokens; give at most that, or leave it out"
        )


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
    """Divide the machine among several executors: each would take all cores and most of the free memory.

    Raises PlanError where they would share a GPU, and nobody says how.
    """
    if options.num_executors == 1:
        return []
    flags = []
    num_processes = options.num_executors * _tensor_parallel(options, environ)
    device = options.extra.get("device") or environ.get(variable_of(ExecutorSettings, "device"))
    has_kv_memory = "kv_memory" in options.extra or variable_of(ExecutorSettings, "kv_memory") in environ
    if device == "cuda" and not has_kv_memory:
        raise PlanError(
            f"--executors {options.num_executors}: on one GPU each would size its KV memory while others take theirs",
            "set --kv-memory to what each may have, or start one executor for each GPU with CUDA_VISIBLE_DEVICES",
        )
    if "threads" not in options.extra and variable_of(ExecutorSettings, "threads") not in environ:
        flags += ["--threads", str(max(1, (os.cpu_count() or 1) // num_processes))]
    if not has_kv_memory:
        flags += ["--kv-memory", str(int(_available_memory() * _KV_SHARE / num_processes))]
    return flags


def _tensor_parallel(options: PlanOptions, environ: Mapping[str, str]) -> int:
    """Return the processes of one executor; the flag has been checked."""
    variable = variable_of(ExecutorSettings, "tensor_parallel")
    return int(options.extra.get("tensor_parallel") or environ.get(variable) or 1)


def _available_memory() -> int:
    """Return the bytes that programs can still take, by /proc/meminfo (proc(5))."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _offset(first: int | None, place: int, own: int, own_place: int = 0) -> int:
    """Return the port `place` after `first`, or `own_place` after the service's own; 0, a free one, stays 0."""
    base, distance = (own, own_place) if first is None else (first, place)
    return base and base + distance


class _Claims:
    """Ports of one plan, held until it is made, so that no two services get the same. Ask `check` after all claims."""

    def __init__(self) -> None:
        self._held = ExitStack()
        self._refused: dict[str, str] = {}
        """Why the system refused each address, with the flag that chooses another."""
        self._ports: set[int] = set()

    def __enter__(self) -> _Claims:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def claim(self, host: str, port: int, flag: str) -> int:
        """Return `port`, or a free one for 0; where it is taken, `check` will say so, naming `flag`.

        Raises BadSettingError for what is no port.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        claim = self._held.enter_context(socket.socket(family, socket.SOCK_STREAM))
        # Connections that ended a moment ago do not count; a listener does.
        claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            claim.bind((host.strip("[]"), port))
            claim.listen()
        except OverflowError:
            raise BadSettingError(f"{flag}: {port} is no port, they end at 65535") from None
        except OSError as error:
            # What is no address of this machine has none of its ports.
            is_elsewhere = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
            self._refused.setdefault(f"{host}:{port}", f"{error.strerror}; {'--bind' if is_elsewhere else flag}")
            self._ports.add(port)
            return port
        got = int(claim.getsockname()[1])
        self._ports.add(got)
        return got

    def check(self, gateway_host: str, gateway_port: int) -> None:
        """Raise PlanError where ports are taken: all of them at once, and whether a gateway of Octavo's has its own."""
        if not self._refused:
            return
        self._held.close()  # whoever is asked now is somebody else
        listed = ", ".join(f"{address} ({why})" for address, why in self._refused.items())
        is_taken = f"{gateway_host}:{gateway_port}" in self._refused
        advice = _advice(f"{_reachable(gateway_host)}:{gateway_port}" if is_taken else None)
        raise PlanError(f"cannot listen on {listed}", advice)

    def claim_from(self, host: str, first: int, count: int, flag: str) -> list[int]:
        """Return `count` ports from `first` on, or free ones for 0. After the first, those of this plan are left out:
        the usual port of the operator's API lies among the executors'.
        """
        ports: list[int] = []
        port = first
        for _ in range(count):
            if ports and first:
                port = next(each for each in itertools.count(ports[-1] + 1) if each not in self._ports)
            ports.append(self.claim(host, port, flag))
        return ports


def _advice(gateway: str | None) -> str:
    """Return what to do about taken ports. `gateway`: where what answers may be a cell that runs already."""
    # Imported here, since gRPC takes a while to import.
    from octavo.client.discovery import GATEWAY, find_all_blocking

    others = "stop what uses them, or choose others by these flags (0 picks a free one)"
    if gateway is not None and find_all_blocking(GATEWAY, [gateway]):
        return f"a cell of Octavo runs here already: `octavo chat --address {gateway}` talks to it; or {others}"
    return others


def _reachable(bind: str) -> str:
    return _WILDCARDS.get(bind, bind)
