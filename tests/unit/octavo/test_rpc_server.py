"""The server every service starts: error mapping, health, reflection, limits, over a real channel."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from octavo.rpc.channel import open_channel
from octavo.rpc.errors import FieldViolation, ServiceError, from_rpc_error, invalid_argument
from octavo.rpc.reflection import V1_SERVICE_NAME
from octavo.rpc.server import PortTakenError, RpcServer, wait_for_signal
from octavo.v1 import inference_pb2, inference_pb2_grpc

SERVICE = "octavo.v1.InferenceService"
QUEUE_FULL = ServiceError(
    grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "the queue is full", metadata={"limit": "4"}, retry_delay=1.5
)
BAD_FIELDS = invalid_argument(
    [FieldViolation("n", "must be 1 to 128"), FieldViolation("sampling.top_p", "must be > 0")]
)


class Servicer(inference_pb2_grpc.InferenceServiceServicer):
    """Fails in every way a handler can; counts the tokens it was sent."""

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Any) -> inference_pb2.TokenizeResponse:  # noqa: N802
        if request.text == "crash":
            raise RuntimeError("secret detail")
        raise BAD_FIELDS

    async def Detokenize(  # noqa: N802
        self, request: inference_pb2.DetokenizeRequest, context: Any
    ) -> inference_pb2.DetokenizeResponse:
        return inference_pb2.DetokenizeResponse(text=str(len(request.token_ids)))

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        yield inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text="a"))
        raise QUEUE_FULL


@pytest_asyncio.fixture
async def server() -> AsyncIterator[RpcServer]:
    """A started server on a free port."""
    rpc_server = RpcServer("127.0.0.1", 0)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Servicer(), rpc_server.server)
    await rpc_server.start(SERVICE)
    yield rpc_server
    await rpc_server.stop(0)


@pytest_asyncio.fixture
async def channel(server: RpcServer) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to it."""
    async with open_channel(f"127.0.0.1:{server.port}") as opened:
        yield opened


@pytest.mark.asyncio
async def test_service_error_crosses_the_wire_whole(channel: grpc.aio.Channel) -> None:
    """Code, reason, message, metadata and retry delay of an error in a stream arrive as they were raised."""
    call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest())
    assert (await call.read()).delta.text == "a"
    with pytest.raises(grpc.RpcError) as raised:
        await call.read()
    error = from_rpc_error(raised.value)
    assert (error.code, error.reason, error.message) == (QUEUE_FULL.code, QUEUE_FULL.reason, QUEUE_FULL.message)
    assert (error.metadata, error.retry_delay) == ({"limit": "4"}, 1.5)


@pytest.mark.asyncio
async def test_field_violations_are_all_listed(channel: grpc.aio.Channel) -> None:
    """INVALID_ARGUMENT carries every violation, in details and in words."""
    with pytest.raises(grpc.RpcError) as raised:
        await inference_pb2_grpc.InferenceServiceStub(channel).Tokenize(inference_pb2.TokenizeRequest())
    error = from_rpc_error(raised.value)
    assert error.violations == BAD_FIELDS.violations
    assert "sampling.top_p: must be > 0" in error.message


@pytest.mark.asyncio
async def test_unexpected_exception_is_internal_and_tells_nothing(channel: grpc.aio.Channel) -> None:
    """A bug in a handler is INTERNAL with an ErrorInfo; its words stay in the server's log."""
    with pytest.raises(grpc.RpcError) as raised:
        await inference_pb2_grpc.InferenceServiceStub(channel).Tokenize(inference_pb2.TokenizeRequest(text="crash"))
    error = from_rpc_error(raised.value)
    assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert "secret" not in error.message


GARBAGE = b"\xff\xfe\xfd garbage"


@pytest.mark.asyncio
@pytest.mark.parametrize("method", ["Tokenize", "Generate"])
async def test_bytes_that_are_no_message_are_invalid(
    channel: grpc.aio.Channel, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that sends garbage is told so, by a typed error, whatever the rpc; it is no fault of the server's."""
    call = channel.unary_stream(f"/{SERVICE}/{method}")(GARBAGE)
    with pytest.raises(grpc.RpcError) as raised:
        await call.read()
    error = from_rpc_error(raised.value)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE")
    assert not caplog.records


@pytest.mark.asyncio
async def test_garbage_within_a_stream_ends_it(channel: grpc.aio.Channel) -> None:
    """Where requests are a stream, a message before the garbage is answered, and the garbage ends the call."""
    call = channel.stream_stream(f"/{V1_SERVICE_NAME}/ServerReflectionInfo")()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString())
    assert await call.read()
    await call.write(GARBAGE)
    with pytest.raises(grpc.RpcError) as raised:
        await call.read()
    assert from_rpc_error(raised.value).reason == "MALFORMED_MESSAGE"


@pytest.mark.asyncio
async def test_a_message_above_grpcs_default_limit_passes(channel: grpc.aio.Channel) -> None:
    """E16: token ids far above the 4 MiB default cross the hop."""
    ids = [2**28] * (6 * 2**20 // 5)
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    response = await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=ids))
    assert response.text == str(len(ids))


@pytest.mark.asyncio
async def test_huge_metadata_is_refused_and_the_server_lives(channel: grpc.aio.Channel) -> None:
    """F12: a megabyte of metadata ends that call alone."""
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    with pytest.raises(grpc.RpcError) as raised:
        await stub.Detokenize(inference_pb2.DetokenizeRequest(), metadata=(("x-big", "a" * 2**20),))
    assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
    assert (await stub.Detokenize(inference_pb2.DetokenizeRequest())).text == "0"


@pytest.mark.asyncio
async def test_health_watch_streams_every_change(server: RpcServer, channel: grpc.aio.Channel) -> None:
    """Watch answers at once and again on each change, and draining is final."""
    call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
    assert (await call.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    await server.health.set(SERVICE, True)
    assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVING
    await server.health.drain()
    assert (await call.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    await server.health.set(SERVICE, True)
    response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))
    assert response.status == health_pb2.HealthCheckResponse.NOT_SERVING
    call.cancel()


@pytest.mark.asyncio
@pytest.mark.parametrize("package", ["v1", "v1alpha"])
async def test_reflection_answers_under_both_names(channel: grpc.aio.Channel, package: str) -> None:
    """A reflection client of either version finds the services and their files."""
    method = channel.stream_stream(
        f"/grpc.reflection.{package}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    call = method(
        iter(
            [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol=V1_SERVICE_NAME),
            ]
        )
    )
    listed, found, v1 = [response async for response in call]
    names = {service.name for service in listed.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health", V1_SERVICE_NAME} <= names
    assert found.file_descriptor_response.file_descriptor_proto
    assert v1.file_descriptor_response.file_descriptor_proto


@pytest.mark.asyncio
async def test_a_peer_slow_to_answer_is_waited_for(server: RpcServer) -> None:
    """A connection whose first bytes take a while, as on a busy machine, is not given up and begun again."""
    connections = 0

    async def relay(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            sink.write(data)
        sink.close()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await asyncio.sleep(0.6)
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(relay(reader, far_writer), relay(far_reader, writer), return_exceptions=True)

    listener = await asyncio.start_server(slow, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with open_channel(f"127.0.0.1:{port}") as channel:
        response = await inference_pb2_grpc.InferenceServiceStub(channel).Detokenize(inference_pb2.DetokenizeRequest())
    assert response.text == "0"
    assert connections == 1
    listener.close()


@pytest.mark.asyncio
async def test_a_taken_port_is_an_error(server: RpcServer) -> None:
    """Two servers never share a port: the second fails with the address, and the flag that gives another."""
    second = RpcServer("127.0.0.1", server.port, "--other-port")
    with pytest.raises(PortTakenError, match=f"{server.port}.*another port with --other-port"):
        await second.start(SERVICE)
    await second.server.stop(None)


@pytest.mark.asyncio
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_wait_for_signal_returns_on_both_signals(signum: signal.Signals) -> None:
    """SIGTERM and SIGINT ask for the same orderly end."""
    waiting = asyncio.create_task(wait_for_signal())
    await asyncio.sleep(0)
    os.kill(os.getpid(), signum)
    await asyncio.wait_for(waiting, 5)
