"""What the clients raise, and what it says to a person."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from client_fakes import Face, deltas_of, fail, hang, serving

from octavo.client import (
    AdminClient,
    AsyncClient,
    Client,
    DeadlineExceededError,
    InvalidArgumentError,
    RequestCancelledError,
    ServiceError,
    UnavailableError,
    UnimplementedError,
)
from octavo.client.errors import ERROR_CLASSES
from octavo.rpc.errors import FieldViolation
from octavo.rpc.server import RpcServer


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that is taken and refuses."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_each_code_has_its_class(face: Face, code: grpc.StatusCode) -> None:
    """A status becomes the class of the table, else ServiceError itself, with everything that the peer told."""
    violations = (FieldViolation("n", "must be 1"),)
    refuse = fail(
        code, "SOME_REASON", "because", after=list(deltas_of("a")), metadata={"k": "v"}, violations=violations
    )
    with serving(refuse) as gateway, pytest.raises(ServiceError, match="because") as raised:
        face.read(gateway.address, "x")
    error = raised.value
    assert type(error) is ERROR_CLASSES.get(code, ServiceError)
    assert (error.code, error.reason, error.metadata) == (code, "SOME_REASON", {"k": "v"})
    assert error.violations == violations


def test_bad_fields_reach_the_caller(face: Face) -> None:
    """Each violation that the gateway names is there, and the text names them all."""
    violations = (FieldViolation("sampling.top_p", "must be 0 to 1"), FieldViolation("n", "must be at least 1"))
    message = "sampling.top_p: must be 0 to 1; n: must be at least 1"
    refuse = fail(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", message, violations=violations)
    with serving(refuse) as gateway, pytest.raises(InvalidArgumentError, match=re.escape(message)) as raised:
        face.call(gateway.address, "complete", "x", top_p=2, n=0)
    assert raised.value.violations == violations


def test_a_refused_connection_says_where_and_what_to_do(face: Face, closed_port: int) -> None:
    """The address, the system's reason, and the two commands that help; none of gRPC's own words."""
    with pytest.raises(UnavailableError) as raised:
        face.call(f"127.0.0.1:{closed_port}", "list_models")
    assert str(raised.value) == (
        f"cannot connect to the gateway at 127.0.0.1:{closed_port}: connection refused; "
        "`octavo up MODEL` starts a cell, `octavo doctor` says what runs"
    )


def test_the_admin_port_is_called_so(closed_port: int) -> None:
    """Operators are told which of the two ports does not answer."""
    with (
        AdminClient(f"127.0.0.1:{closed_port}") as client,
        pytest.raises(UnavailableError, match="gateway's admin port"),
    ):
        client.get_load()


def test_a_name_that_is_none(face: Face) -> None:
    """A host that cannot be looked up is a failure to connect."""
    with pytest.raises(UnavailableError, match=r"cannot connect to the gateway at host\.invalid:50051"):
        face.call("host.invalid:50051", "list_models")


def test_a_timeout_says_how_long_it_was(face: Face) -> None:
    """Whether the client's timer or the gateway's fires first, error and words are the same; the request is over."""
    with serving(hang("a")) as gateway:
        with pytest.raises(DeadlineExceededError, match=r"within its timeout of 0\.2 s; give it a longer one"):
            face.read(gateway.address, "x", timeout=0.2)
        assert gateway.ended.wait(20)
    deadline = grpc.StatusCode.DEADLINE_EXCEEDED
    for reason in ("DEADLINE", "DEADLINE_EXCEEDED"):
        refuse = fail(deadline, reason, "the deadline passed")
        with serving(refuse) as gateway, pytest.raises(DeadlineExceededError, match=r"within its timeout of 50 s"):
            face.call(gateway.address, "complete", "x", timeout=50)


def test_limits_of_time_are_told_from_a_timeout(face: Face) -> None:
    """A queue TTL or first-token target that ends a call is not called its timeout, whose length is another."""
    refuse = fail(grpc.StatusCode.DEADLINE_EXCEEDED, "QUEUE_TTL", "it has waited for 2 s")
    with serving(refuse) as gateway, pytest.raises(DeadlineExceededError, match="it has waited for 2 s") as raised:
        face.call(gateway.address, "complete", "x", timeout=50, queue_ttl=2)
    assert raised.value.reason == "QUEUE_TTL"


def test_an_operators_cancel_is_told_from_a_cancelled_task(face: Face) -> None:
    """CANCELLED by the server is an error of ours with its reason, and no asyncio.CancelledError."""
    refuse = fail(
        grpc.StatusCode.CANCELLED, "CANCELLED_BY_OPERATOR", "an operator ended the request", after=list(deltas_of("a"))
    )
    with serving(refuse) as gateway, pytest.raises(RequestCancelledError, match="operator") as raised:
        face.read(gateway.address, "x")
    assert raised.value.reason == "CANCELLED_BY_OPERATOR"


@pytest.mark.asyncio
async def test_a_server_that_is_no_gateway_is_recognized() -> None:
    """An rpc that the peer does not know says so, with the address."""
    server = RpcServer("127.0.0.1", 0)
    await server.start()
    async with AsyncClient(f"127.0.0.1:{server.port}") as client:
        with pytest.raises(UnimplementedError, match=f"{server.port} does not know Tokenize"):
            await client.tokenize("x")
    await server.stop(0)


@pytest.mark.asyncio
async def test_a_connection_that_breaks_after_a_token_is_told_as_such() -> None:
    """A peer that is gone says nothing: the error tells what broke and what to do, and nothing is repeated."""
    with serving(hang("a")) as gateway:
        cut: list[asyncio.StreamWriter] = []

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(65536):
                    writer.write(data)
            writer.close()

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection(*gateway.address.split(":"))
            cut.extend((writer, far_writer))
            await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

        listener = await asyncio.start_server(relay, "127.0.0.1", 0)
        address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        async with listener, AsyncClient(address) as client:
            deltas = aiter(client.generate("x", timeout=20))
            assert (await anext(deltas)).text == "a"
            listener.close()
            for writer in cut:
                writer.transport.abort()
            with pytest.raises(UnavailableError) as raised:
                await anext(deltas)
        assert len(gateway.requests) == 1
    assert str(raised.value).startswith(f"the connection to the gateway at {address} was lost: ")
    assert "octavo doctor" in str(raised.value)


@pytest.mark.parametrize("address", ["", "nowhere", "host:", "host:99999", ":50051", "http://host:x"])
@pytest.mark.parametrize("make", [Client, AdminClient])
def test_a_bad_address_is_refused_at_once(make: Any, address: str) -> None:
    """A client with an address that cannot be one is not made."""
    with pytest.raises(InvalidArgumentError, match="address: must be host:port") as raised:
        make(address)
    assert raised.value.violations[0].field == "address"
