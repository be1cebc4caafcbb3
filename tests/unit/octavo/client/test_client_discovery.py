"""Where gateways are looked for, and what counts as one."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import Callable

import pytest
from client_fakes import FakeGateway, reply, serving
from ports import take_port

from octavo.client import AdminClient, AsyncClient, Client, InvalidArgumentError, UnavailableError
from octavo.client.async_connection import AsyncConnection
from octavo.client.client_rpcs import TOKENIZE
from octavo.client.discovery import (
    ADMIN,
    ADMIN_PORTS,
    GATEWAY,
    GATEWAY_PORTS,
    Api,
    Endpoint,
    find,
    find_all,
    find_all_blocking,
    find_blocking,
    given_address,
    local_addresses,
    probe,
)
from octavo.client.sync_connection import SyncConnection
from octavo.settings import known_variables
from octavo.v1 import inference_pb2 as pb

TOKENS = reply(pb.TokenizeResponse(token_ids=[1]))
Find = Callable[[Api], str]


@pytest.fixture(autouse=True)
def _without_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of whoever runs the tests do not matter."""
    monkeypatch.delenv(GATEWAY.variable, raising=False)
    monkeypatch.delenv(ADMIN.variable, raising=False)


@pytest.fixture(params=["blocking", "asyncio"])
def find_one(request: pytest.FixtureRequest) -> Find:
    """Both ways of looking."""
    return find_blocking if request.param == "blocking" else lambda api: asyncio.run(find(api))


@pytest.fixture(params=["blocking", "asyncio"])
def find_every(request: pytest.FixtureRequest) -> Callable[..., list[Endpoint]]:
    """Both ways of listing."""
    if request.param == "blocking":
        return find_all_blocking
    return lambda *args: asyncio.run(find_all(*args))


def port_of(gateway: FakeGateway) -> int:
    """The port it listens on."""
    return int(gateway.address.rpartition(":")[2])


def at(*gateways: FakeGateway | int, api: Api = GATEWAY) -> Api:
    """The API, looked for at just these ports."""
    ports = tuple(each if isinstance(each, int) else port_of(each) for each in gateways)
    return dataclasses.replace(api, ports=ports)


def test_ports_are_the_defaults_and_the_published_ranges() -> None:
    """The service's own port comes first, then the range of docker-compose.yml."""
    assert (50051, *range(50061, 50070)) == GATEWAY_PORTS
    assert (50054, *range(50071, 50080)) == ADMIN_PORTS
    assert local_addresses(GATEWAY)[:2] == ["127.0.0.1:50051", "127.0.0.1:50061"]
    assert {GATEWAY.variable, ADMIN.variable} <= known_variables()


def test_the_first_that_serves_is_taken(find_one: Find) -> None:
    """Port order decides among those that serve; one that does not serve yet is passed over."""
    with serving(is_serving=False) as starting, serving() as second, serving() as third:
        assert find_one(at(starting, second, third)) == second.address
        assert find_one(at(third, starting, second)) == third.address


def test_one_that_does_not_serve_yet_is_better_than_none(find_one: Find) -> None:
    """A gateway without an executor answers with a clear error: more than an address that was not found."""
    with serving(is_serving=False) as starting:
        assert find_one(at(take_port(), starting, take_port())) == starting.address


def test_an_open_port_is_no_gateway(find_every: Callable[..., list[Endpoint]]) -> None:
    """A listener that says nothing, a scheduler's health and a closed port are not taken for one."""
    with socket.socket() as mute, serving(services=["octavo.internal.scheduler.v1.SchedulerService"]) as scheduler:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        with serving() as gateway, serving(is_serving=False) as starting:
            api = at(mute.getsockname()[1], scheduler, gateway, take_port(), starting)
            found = find_every(api, local_addresses(api), 0.5)
    assert found == [Endpoint(gateway.address, True), Endpoint(starting.address, False)]


def test_each_api_is_known_by_its_own_service(find_one: Find) -> None:
    """The admin port is not taken for the public one, nor the other way round."""
    with serving(services=[ADMIN.service]) as admin_port, serving(services=[GATEWAY.service]) as public:
        assert find_one(at(admin_port, public, api=GATEWAY)) == public.address
        assert find_one(at(public, admin_port, api=ADMIN)) == admin_port.address


@pytest.mark.parametrize("api", [GATEWAY, ADMIN])
def test_none_found_says_where_and_what_to_do(find_one: Find, api: Api) -> None:
    """Host and ports that were tried, the commands that help, and the variable."""
    low, high = take_port(), take_port()
    with pytest.raises(UnavailableError) as raised:
        find_one(dataclasses.replace(api, ports=(1, low, high)))
    assert raised.value.reason == "NO_GATEWAY"
    words = f"no {api.noun} answers at 127.0.0.1, ports 1 and {low} to {high}; `octavo up MODEL` starts a cell"
    assert str(raised.value).startswith(words)
    assert f"{api.variable}=HOST:PORT" in str(raised.value)


def test_the_variable_wins_over_looking(find_one: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address that the environment names is taken as it is; an empty variable is none."""
    monkeypatch.setenv(GATEWAY.variable, "elsewhere:1")
    assert find_one(GATEWAY) == "elsewhere:1"
    monkeypatch.setenv(GATEWAY.variable, "")
    with serving() as gateway:
        assert find_one(at(gateway)) == gateway.address


def test_a_bad_variable_is_named(find_one: Find) -> None:
    """The error names the variable and what it wants."""
    with pytest.raises(InvalidArgumentError, match=r"OCTAVO_ADMIN_ADDRESS: must be host:port, is 'nowhere'"):
        given_address(ADMIN, {ADMIN.variable: "nowhere"})
    assert given_address(ADMIN, {}) is None


@pytest.mark.asyncio
async def test_a_proxy_is_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where http_proxy is set, as companies do, gRPC would send even 127.0.0.1 through it."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{take_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    with serving(TOKENS) as gateway:
        assert await probe(GATEWAY, gateway.address) == Endpoint(gateway.address, True)
        with Client(f"localhost:{port_of(gateway)}") as client:
            assert client.tokenize("x") == [1]


def test_clients_look_on_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making a client asks nobody; its address is known once it has been used, and is asked for once."""
    with serving(TOKENS) as gateway:
        monkeypatch.setenv(GATEWAY.variable, gateway.address)
        with Client() as client:
            assert client.address is None
            assert client.tokenize("x") == [1]
            monkeypatch.delenv(GATEWAY.variable)
            assert client.tokenize("x") == [1]
            assert client.address == gateway.address
    assert AdminClient("host:1").address == "host:1"


@pytest.mark.asyncio
async def test_many_first_uses_at_once_look_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks that use a new client in one moment share its connection."""
    with serving(TOKENS) as gateway:
        async with AsyncClient(gateway.address) as client:
            assert await asyncio.gather(*(client.tokenize("x") for _ in range(20))) == [[1]] * 20


@pytest.mark.asyncio
async def test_a_client_that_found_nobody_looks_again() -> None:
    """A failed search leaves no trace: the gateway that comes up later is found by the same client."""
    port = take_port()
    request = pb.TokenizeRequest(text="x")
    blocking, looping = SyncConnection(at(port, port, port), None), AsyncConnection(at(port, port, port), None)
    with pytest.raises(UnavailableError):
        await asyncio.to_thread(blocking.unary, TOKENIZE, request, None)
    with pytest.raises(UnavailableError):
        await looping.unary(TOKENIZE, request, None)
    with serving(TOKENS, port=port):
        assert (await asyncio.to_thread(blocking.unary, TOKENIZE, request, None)).token_ids == [1]
        assert (await looping.unary(TOKENIZE, request, None)).token_ids == [1]
        blocking.close()
        await looping.close()
