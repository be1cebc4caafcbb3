"""The ports of a cell on this machine: free, or taken and by whom; and the cells that are found."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from octavo.client.discovery import ADMIN, GATEWAY, Api, Endpoint, find_all, local_addresses, probe
from octavo.settings import ExecutorSettings, GatewaySettings, SchedulerSettings
from octavo.terminal.checks.finding import Finding, Level
from octavo.terminal.checks.listeners import is_listening, listener_of
from octavo.terminal.checks.variables import settings_of
from octavo.terminal.figures import counted
from octavo.terminal.suggestion import with_model

_PORTS, _SERVICES = "ports", "services"
_TIMEOUT = 2.0
SCHEDULER = Api("a scheduler", "octavo.internal.scheduler.v1.SchedulerService", "", ())
EXECUTOR = Api("an executor", "octavo.internal.executor.v1.ExecutorService", "", ())
_APIS = (GATEWAY, ADMIN, SCHEDULER, EXECUTOR)


class Page(Enum):
    """What an HTTP port of ours serves: a path that needs no key, and what is found there and nowhere else."""

    METRICS = ("a metrics page of Octavo", "/metrics", b"\n# HELP octavo_")
    OPENAI = ("the OpenAI-compatible API of Octavo", "/openapi.json", b'"title":"Octavo"')


@dataclass(frozen=True)
class PortUse:
    """A port that a service of the cell listens on. `api` None: one of HTTP, see `page`. `flag`: of `octavo up`."""

    subject: str
    host: str
    port: int
    flag: str
    api: Api | None = None
    page: Page = Page.METRICS

    @property
    def address(self) -> str:
        """host:port, to dial."""
        return f"{self.host}:{self.port}"


def ports_of(environ: Mapping[str, str]) -> list[PortUse]:
    """Return the ports of a cell of one executor, as the variables or else the defaults have them."""
    gateway, scheduler = settings_of(GatewaySettings, environ), settings_of(SchedulerSettings, environ)
    executor = settings_of(ExecutorSettings, environ)
    outside, inside = _reachable(gateway.bind), "127.0.0.1"
    uses = [
        PortUse("gateway", outside, gateway.port, "--gateway-port", GATEWAY),
        PortUse("admin", outside, gateway.admin_port, "--admin-port", ADMIN),
        PortUse("http", outside, gateway.http_port, "--http-port", page=Page.OPENAI),
        PortUse("scheduler", inside, scheduler.port, "--scheduler-port", SCHEDULER),
        PortUse("executor", inside, executor.port, "--executor-port", EXECUTOR),
        PortUse("gateway metrics", outside, gateway.metrics_port, "--metrics-port"),
        PortUse("scheduler metrics", inside, scheduler.metrics_port, "--metrics-port"),
        PortUse("executor metrics", inside, executor.metrics_port, "--metrics-port"),
    ]
    return [use for use in uses if use.port != 0]


async def check_ports(uses: list[PortUse]) -> list[Finding]:
    """Return a finding a port. One that another program has is a problem: `octavo up` cannot listen there."""
    return list(await asyncio.gather(*(_check_port(use) for use in uses)))


async def check_services(asked: Mapping[Api, list[str]] | None = None) -> list[Finding]:
    """Return the gateways that answer at `asked`, by default on this machine's ports, with what each can do."""
    asked = {api: local_addresses(api) for api in (GATEWAY, ADMIN)} if asked is None else asked
    findings = [
        await _describe(api, endpoint)
        for api, addresses in asked.items()
        for endpoint in await find_all(api, addresses, _TIMEOUT)
    ]
    if not findings:
        advice = with_model("octavo up MODEL starts a cell")
        findings.append(Finding(_SERVICES, "none", Level.NOTE, "no gateway answers on this machine", advice))
    return findings


async def _check_port(use: PortUse) -> Finding:
    subject = f"{use.port} {use.subject}"
    if not await asyncio.to_thread(is_listening, use.host, use.port):
        return Finding(_PORTS, subject, Level.OK, "free")
    if use.api is None:
        name, path, mark = use.page.value
        url = f"http://{use.address}{path}"
        if await asyncio.to_thread(_has_mark, url, mark):
            return Finding(_PORTS, subject, Level.OK, f"{name}: {url}")
    else:
        answers = await asyncio.gather(*(probe(api, use.address, _TIMEOUT) for api in _APIS))
        for api, endpoint in zip(_APIS, answers, strict=True):
            if endpoint is None:
                continue
            state = "serves" if endpoint.is_serving else "does not serve"
            text = f"taken by {api.name} of Octavo, which {state}"
            return Finding(_PORTS, subject, Level.OK if api is use.api else Level.NOTE, text)
    who = await asyncio.to_thread(listener_of, use.port) or "another program"
    advice = f"stop it, or choose other ports: octavo up {use.flag} 0 takes a free one"
    return Finding(_PORTS, subject, Level.PROBLEM, f"taken by {who}, which is no service of Octavo", advice)


async def _describe(api: Api, endpoint: Endpoint) -> Finding:
    from octavo.client import AsyncClient
    from octavo.rpc.errors import ServiceError

    subject = f"{'admin' if api is ADMIN else 'gateway'} {endpoint.address}"
    if api is ADMIN:
        text = "answers `octavo requests`, `octavo cancel`, `octavo load` and `octavo kv`"
        return Finding(_SERVICES, subject, Level.OK, text)
    try:
        async with AsyncClient(endpoint.address) as client:
            models = await client.list_models(timeout=_TIMEOUT)
    except ServiceError as error:
        return Finding(_SERVICES, subject, Level.NOTE, f"does not list its models: {error}", "repeat this in a moment")
    told = ", ".join(f"{model.name} ({counted(model.ready_executors, 'executor')} ready)" for model in models)
    if endpoint.is_serving:
        return Finding(_SERVICES, subject, Level.OK, f"serves {told}", "octavo chat")
    advice = "executors may be starting; else see the logs of scheduler and executors"
    return Finding(_SERVICES, subject, Level.NOTE, f"does not serve yet: {told}", advice)


def _has_mark(url: str, mark: bytes) -> bool:
    # Straight to the address: what a proxy says of it is not the question.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_TIMEOUT) as page:
            return mark in b"\n" + page.read()
    except (OSError, ValueError, urllib.error.URLError):
        return False


def _reachable(bind: str) -> str:
    """Return where a service that is bound so can be dialled."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}.get(bind, bind)
