"""Where the gateways of this machine are: the one place that knows which ports to ask.

An open port says little: something else may listen there. So each one is asked for the health (grpc.health.v1) of the
service that is wanted, which nothing but a gateway knows.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.client.client_rpcs import ADMIN_SERVICE, INFERENCE_SERVICE
from octavo.client.errors import START_HINT, UnavailableError, invalid, unavailable
from octavo.rpc.channel import open_channel, open_sync_channel
from octavo.rpc.settings import parse_address, parse_api_key
from octavo.settings import ADMIN_PORT, GATEWAY_PORT

HOST = "127.0.0.1"
API_KEY_VARIABLE = "OCTAVO_API_KEY"
GATEWAY_PORTS: tuple[int, ...] = (GATEWAY_PORT, *range(50061, 50070))
"""Ports where a gateway of this machine may be: its default, then the range that docker-compose.yml publishes."""
ADMIN_PORTS: tuple[int, ...] = (ADMIN_PORT, *range(50071, 50080))
"""Ports where the operator's API of a gateway may be, likewise."""

PROBE_TIMEOUT = 2.0
"""Seconds that a port may take to answer. All are asked at once."""


@dataclass(frozen=True)
class Api:
    """One of the gateway's two APIs, and where to look for it."""

    name: str
    """For sentences, with its article."""
    service: str
    """Full name of the service whose health tells that it is there."""
    variable: str
    """Environment variable that names an address."""
    ports: tuple[int, ...]

    @property
    def noun(self) -> str:
        """The name without its article."""
        return self.name.removeprefix("a ")


GATEWAY = Api("a gateway", INFERENCE_SERVICE, "OCTAVO_ADDRESS", GATEWAY_PORTS)
ADMIN = Api("a gateway's admin port", ADMIN_SERVICE, "OCTAVO_ADMIN_ADDRESS", ADMIN_PORTS)


@dataclass(frozen=True)
class Endpoint:
    """A place where an API answers. It serves only while an executor is ready behind it."""

    address: str
    is_serving: bool


def checked_addresses(addresses: str | Sequence[str], source: str = "address") -> list[str]:
    """Return the addresses of a list, or of a text with commas. Raises InvalidArgumentError, naming `source`."""
    listed = addresses.split(",") if isinstance(addresses, str) else addresses
    if isinstance(listed, bytes) or not isinstance(listed, Sequence):
        raise TypeError(f"{source} must be host:port, is {addresses!r}")
    if not listed:
        raise invalid(source, "must be host:port or several, is empty")
    return [checked_address(each.strip() if isinstance(each, str) else each, source) for each in listed]


def checked_address(address: str, source: str = "address") -> str:
    """Return an address as it is. Raises InvalidArgumentError, naming `source`, where it is not host:port."""
    if not isinstance(address, str):
        raise TypeError(f"{source} must be host:port, is {address!r}")
    try:
        return parse_address(address)
    except ValueError as error:
        raise invalid(source, f"must be {error}, is {address!r}") from None


def given_address(api: Api, environ: Mapping[str, str] | None = None) -> str | None:
    """Return the first address that the environment names; None where it names none. Raises InvalidArgumentError."""
    addresses = given_addresses(api, environ)
    return addresses[0] if addresses else None


def given_addresses(api: Api, environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the addresses that the environment names. Raises InvalidArgumentError."""
    text = (os.environ if environ is None else environ).get(api.variable)
    return checked_addresses(text, api.variable) if text else []


def given_api_key(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the API key that the environment holds; None where it holds none. Raises InvalidArgumentError."""
    key = (os.environ if environ is None else environ).get(API_KEY_VARIABLE)
    return _checked_key(key, API_KEY_VARIABLE) if key else None


def key_metadata(api_key: str | None, source: str = "api_key") -> tuple[tuple[str, str], ...]:
    """Return the metadata that carries a key.

    Raises InvalidArgumentError, naming `source` but never the key, for what cannot be one.
    """
    return () if api_key is None else (("authorization", f"Bearer {_checked_key(api_key, source)}"),)


def _checked_key(api_key: str, source: str) -> str:
    try:
        return parse_api_key(api_key)
    except ValueError as error:
        raise invalid(source, f"must be {error}") from None


def local_addresses(api: Api) -> list[str]:
    """Return the addresses on this machine where the API may be, best first."""
    return [f"{HOST}:{port}" for port in api.ports]


async def ask(api: Api, address: str, timeout: float = PROBE_TIMEOUT) -> Endpoint | None:
    """Ask one address; None where the API is not there. Raises TimeoutError where nothing answers in `timeout` seconds:
    that may be a service which is busy or halted, as well as a program that speaks another protocol.
    """
    async with open_channel(address) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(_question(api), timeout=timeout)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError from None
            return None
    return Endpoint(address, _is_serving(answer))


async def probe(api: Api, address: str, timeout: float = PROBE_TIMEOUT) -> Endpoint | None:
    """As `ask`, and None too where nothing answers within `timeout` seconds."""
    try:
        return await ask(api, address, timeout)
    except TimeoutError:
        return None


async def find_all(api: Api, addresses: Iterable[str] | None = None, timeout: float = PROBE_TIMEOUT) -> list[Endpoint]:
    """Ask `addresses`, by default this machine's, all at once; return those that answered, in order."""
    asked = local_addresses(api) if addresses is None else addresses
    answers = await asyncio.gather(*(probe(api, address, timeout) for address in asked))
    return [endpoint for endpoint in answers if endpoint is not None]


def find_all_blocking(
    api: Api, addresses: Iterable[str] | None = None, timeout: float = PROBE_TIMEOUT
) -> list[Endpoint]:
    """As `find_all`, for code without an event loop."""
    asked = local_addresses(api) if addresses is None else list(addresses)
    channels = [open_sync_channel(address) for address in asked]
    try:
        calls = [
            health_pb2_grpc.HealthStub(channel).Check.future(_question(api), timeout=timeout) for channel in channels
        ]
        found = []
        for address, call in zip(asked, calls, strict=True):
            if call.exception() is None:
                found.append(Endpoint(address, _is_serving(call.result())))
        return found
    finally:
        for channel in channels:
            channel.close()


def best_of(api: Api, found: Iterable[Endpoint]) -> str:
    """Return the address of the first that serves, else of the first. Raises UnavailableError where there is none."""
    endpoints = list(found)
    for endpoint in [*(each for each in endpoints if each.is_serving), *endpoints]:
        return endpoint.address
    raise none_found(api)


def none_found(api: Api) -> UnavailableError:
    """Return the error for an API that answers nowhere on this machine."""
    first, low, high = api.ports[0], api.ports[1], api.ports[-1]
    message = f"no {api.noun} answers at {HOST}, ports {first} and {low} to {high}"
    return unavailable("NO_GATEWAY", f"{message}; {START_HINT}, {api.variable}=HOST:PORT names one elsewhere")


async def find(api: Api) -> str:
    """Return the address of the API: the environment's, else the best on this machine.

    Raises UnavailableError where there is none, InvalidArgumentError where the environment's is no address.
    """
    if given := given_address(api):
        return given
    first, *others = local_addresses(api)
    found = await find_all(api, [first])
    if found and found[0].is_serving:
        return first
    return best_of(api, found + await find_all(api, others))


def find_blocking(api: Api) -> str:
    """As `find`, for code without an event loop."""
    if given := given_address(api):
        return given
    first, *others = local_addresses(api)
    found = find_all_blocking(api, [first])
    if found and found[0].is_serving:
        return first
    return best_of(api, found + find_all_blocking(api, others))


def _question(api: Api) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=api.service)


def _is_serving(answer: health_pb2.HealthCheckResponse) -> bool:
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
