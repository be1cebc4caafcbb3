"""The ports of a cell on this machine: free, or taken and by whom; and the cells that are found."""

from __future__ import annotations

import asyncio
import http.client
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from octavo.client.discovery import ADMIN, GATEWAY, Api, Endpoint, ask, local_addresses
from octavo.settings import ExecutorSettings, GatewaySettings, SchedulerSettings, wrong_client_variables
from octavo.terminal.api_key import API_KEY_HINT
from octavo.terminal.checks.finding import Finding, Level
from octavo.terminal.checks.listeners import is_listening, listener_of
from octavo.terminal.checks.variables import settings_of
from octavo.terminal.figures import counted
from octavo.terminal.suggestion import with_model

_PORTS, _SERVICES = "ports", "services"
_TIMEOUT = 2.0
_SILENT = f"does not answer within {_TIMEOUT:g} s"
_BUSY = "a service that is busy, starting or halted answers later: repeat this"
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


def services_of(environ: Mapping[str, str]) -> dict[Api, list[str]]:
    """Return where the gateways' APIs may be: this machine's usual ports, and what the variables name."""
    uses = ports_of(environ)
    found = {}
    for api in (GATEWAY, ADMIN):
        named = [use.address for use in uses if use.api is api]
        if (given := environ.get(api.variable)) and api.variable not in dict(wrong_client_variables(environ)):
            named.append(given)
        found[api] = list(dict.fromkeys([*named, *local_addresses(api)]))
    return found


async def check_services(asked: Mapping[Api, list[str]]) -> list[Finding]:
    """Return the gateways that answer at `asked`, with what each can do, and those places where all is silent."""
    places = [(api, address) for api, addresses in asked.items() for address in addresses]
    # All at once: each silence takes its time.
    found = await asyncio.gather(*(_service_at(api, address) for api, address in places))
    findings = [finding for finding in found if finding is not None]
    if not findings:
        advice = with_model("octavo up MODEL starts a cell")
        findings.append(Finding(_SERVICES, "none", Level.NOTE, "no gateway answers on this machine", advice))
    return findings


async def _check_port(use: PortUse) -> Finding:
    subject = f"{use.port} {use.subject}"
    if not await asyncio.to_thread(is_listening, use.host, use.port):
        return Finding(_PORTS, subject, Level.OK, "free")
    try:
        finding = await (_check_page(use, subject) if use.api is None else _check_api(use, subject))
    except TimeoutError:
        # Silence proves nothing, so nobody is told to stop what may be a cell at work.
        who = await _listener(use)
        advice = f"{_BUSY}; where it is another program's port, octavo up {use.flag} 0 takes a free one"
        return Finding(_PORTS, subject, Level.NOTE, f"taken by {who}, which {_SILENT}", advice)
    if finding is not None:
        return finding
    who = await _listener(use)
    advice = f"stop it, or choose other ports: octavo up {use.flag} 0 takes a free one"
    return Finding(_PORTS, subject, Level.PROBLEM, f"taken by {who}, which is no service of Octavo", advice)


async def _listener(use: PortUse) -> str:
    return await asyncio.to_thread(listener_of, use.port) or "another program"


async def _check_page(use: PortUse, subject: str) -> Finding | None:
    """Return what is found where it is the page; None where it is another. Raises TimeoutError."""
    name, path, mark = use.page.value
    url = f"http://{use.address}{path}"
    if await asyncio.to_thread(_has_mark, url, mark):
        return Finding(_PORTS, subject, Level.OK, f"{name}: {url}")
    return None


async def _check_api(use: PortUse, subject: str) -> Finding | None:
    """Return which of Octavo's services is there; None where none is. Raises TimeoutError where none says a thing."""
    asked = (ask(api, use.address, _TIMEOUT) for api in _APIS)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    for api, answer in zip(_APIS, answers, strict=True):
        if isinstance(answer, Endpoint):
            state = "serves" if answer.is_serving else "does not serve"
            text = f"taken by {api.name} of Octavo, which {state}"
            return Finding(_PORTS, subject, Level.OK if api is use.api else Level.NOTE, text)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return None


async def _service_at(api: Api, address: str) -> Finding | None:
    try:
        endpoint = await ask(api, address, _TIMEOUT)
    except TimeoutError:
        return Finding(_SERVICES, _subject(api, address), Level.NOTE, _SILENT, _BUSY)
    return None if endpoint is None else await _describe(api, endpoint)


def _subject(api: Api, address: str) -> str:
    return f"{'admin' if api is ADMIN else 'gateway'} {address}"


async def _describe(api: Api, endpoint: Endpoint) -> Finding:
    from octavo.client import AsyncClient
    from octavo.client.errors import UnauthenticatedError
    from octavo.rpc.errors import ServiceError

    subject = _subject(api, endpoint.address)
    if api is ADMIN:
        text = "answers `octavo requests`, `octavo cancel`, `octavo load` and `octavo kv`"
        return Finding(_SERVICES, subject, Level.OK, text)
    try:
        async with AsyncClient(endpoint.address) as client:
            models = await client.list_models(timeout=_TIMEOUT)
    except UnauthenticatedError as error:
        text = "asks for an API key" + (", and not the one that it got" if error.reason == "INVALID_API_KEY" else "")
        return Finding(_SERVICES, subject, Level.NOTE, text, API_KEY_HINT)
    except ServiceError as error:
        return Finding(_SERVICES, subject, Level.NOTE, f"does not list its models: {error}", "repeat this in a moment")
    told = ", ".join(f"{model.name} ({counted(model.ready_executors, 'executor')} ready)" for model in models)
    if endpoint.is_serving:
        return Finding(_SERVICES, subject, Level.OK, f"serves {told}", "octavo chat")
    advice = "executors may be starting; else see the logs of scheduler and executors"
    return Finding(_SERVICES, subject, Level.NOTE, f"does not serve yet: {told}", advice)


def _has_mark(url: str, mark: bytes) -> bool:
    """Whether a page is the one with the mark. Raises TimeoutError where it does not come."""
    # Straight to the address: what a proxy says of it is not the question.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_TIMEOUT) as page:
            return mark in b"\n" + page.read()
    except urllib.error.HTTPError:
        return False
    except OSError as error:
        if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
            raise TimeoutError from None
        return False
    except (ValueError, http.client.HTTPException):
        return False


def _reachable(bind: str) -> str:
    """Return where a service that is bound so can be dialled."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}.get(bind, bind)
