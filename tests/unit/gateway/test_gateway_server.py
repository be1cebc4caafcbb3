"""The assembled gateway: health, reflection, limits, start and stop, as a process too."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cell_of_tests import CELL
from gateway_fakes import TIMEOUT, FakeScheduler, Stack, pool_of, running_stack, text_of
from gateway_page import endings_of
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from ports import take_ports
from prepared_samples import MakePrepared

from gateway import server
from gateway.health import ADMIN_SERVICE, INFERENCE_SERVICE
from gateway.scheduler_client import Backoff
from gateway.server import MODEL_SERVICE, GatewayServer
from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.models.prepared import PreparedModel
from octavo.rpc.channel import open_channel
from octavo.rpc.errors import from_rpc_error
from octavo.rpc.server import PortTakenError
from octavo.settings import GatewaySettings
from octavo.v1 import admin_pb2, inference_pb2, inference_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health_of(stack: Stack, service: str) -> int:
    """Ask for a service's health."""
    answer = await stack.health.Check(health_pb2.HealthCheckRequest(service=service))
    status: int = answer.status
    return status


@pytest.mark.asyncio
async def test_health_follows_the_cell(prepared: PreparedModel) -> None:
    """Process, inference and model serve while the scheduler is there and an executor is ready; Watch tells changes."""
    services = ("", INFERENCE_SERVICE, f"model/{prepared.name}")
    async with running_stack(prepared, FakeScheduler(auto=False)) as stack:
        for change in (
            lambda: stack.scheduler.send_pools([]),
            lambda: stack.scheduler.send_pools([pool_of(prepared)]),
            lambda: stack.scheduler.send_pools([pool_of(prepared, num_executors=0)]),
        ):
            change()
            is_ready = any(pool.num_executors for pool in stack.scheduler.pools)
            for service in services:
                await stack.wait_health(is_ready, service)
        assert await health_of(stack, MODEL_SERVICE) == SERVING
        await stack.scheduler.stop()
        for service in services:
            await stack.wait_health(False, service)


@pytest.mark.asyncio
async def test_before_any_scheduler(prepared: PreparedModel) -> None:
    """A gateway without a scheduler starts, answers what it can by itself, and does not say that it serves."""
    settings = GatewaySettings(
        model=prepared.name, scheduler="127.0.0.1:1", port=0, http_port=0, admin_port=0, metrics_port=0
    )
    gateway = GatewayServer(settings, [prepared], Backoff(0.01, 0.02))
    await gateway.start()
    async with open_channel(f"127.0.0.1:{gateway.port}") as channel:
        stack = Stack(FakeScheduler(), gateway, prepared, channel, channel)
        assert await health_of(stack, "") == NOT_SERVING
        assert await health_of(stack, f"model/{prepared.name}") == NOT_SERVING
        answer = await stack.inference.Tokenize(inference_pb2.TokenizeRequest(text="the"))
        assert len(answer.token_ids) == 1
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stack.generate(inference_pb2.GenerateRequest(text="a"))
        assert from_rpc_error(raised.value).reason == "NO_SCHEDULER"
    await gateway.stop()


@pytest.mark.asyncio
async def test_reflection_lists_the_services_of_each_port(prepared: PreparedModel) -> None:
    """A client without our protos can find the services and the descriptor of their messages."""
    async with running_stack(prepared) as stack:
        for channel, services, symbol, wanted in (
            (stack.channel, {INFERENCE_SERVICE, MODEL_SERVICE}, "octavo.v1.GenerateRequest", "inference"),
            (stack.admin_channel, {ADMIN_SERVICE}, "octavo.v1.RequestInfo", "admin"),
        ):
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            names = {service.name for service in (await call.read()).list_services_response.service}
            assert {name for name in names if not name.startswith("grpc.reflection.")} == {
                *services,
                "grpc.health.v1.Health",
            }
            await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol))
            files = (await call.read()).file_descriptor_response.file_descriptor_proto
            parsed = [descriptor_pb2.FileDescriptorProto.FromString(file) for file in files]
            assert f"octavo/v1/{wanted}.proto" in {file.name for file in parsed}
            call.cancel()


@pytest.mark.asyncio
async def test_huge_metadata_is_refused(prepared: PreparedModel) -> None:
    """Metadata of a megabyte is refused by the transport; the gateway goes on."""
    async with running_stack(prepared) as stack:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.gateway.port}") as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.Tokenize(inference_pb2.TokenizeRequest(text="a"), metadata=(("x-big", "x" * 1_000_000),))
            assert raised.value.code() is not grpc.StatusCode.OK
        assert text_of(await stack.generate(inference_pb2.GenerateRequest(text="the"))) == "the"


@pytest.mark.asyncio
async def test_stop_ends_every_stream(prepared: PreparedModel) -> None:
    """When the gateway stops each call in flight ends with UNAVAILABLE and each request is cancelled for that (F3)."""
    scheduler = FakeScheduler(script=lambda submit, choice: [5] * 500, auto=False)
    async with running_stack(prepared, scheduler) as stack:
        requests = [inference_pb2.GenerateRequest(text="the cat") for _ in range(5)]
        calls = [asyncio.create_task(stack.generate(request)) for request in requests]
        wrapped = inference_pb2.GenerateOnceRequest(request=requests[0])
        calls.append(asyncio.ensure_future(stack.inference.GenerateOnce(wrapped)))
        await scheduler.wait_received("submit", 6)
        scheduler.step(3)
        await stack.gateway.stop()
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, grpc.aio.AioRpcError)
            error = from_rpc_error(result)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
            assert error.retry_delay is not None
        cancels = await scheduler.wait_received("cancel", 6)
        assert {cancel.reason for cancel in cancels} == {scheduler_pb2.CANCEL_REASON_SHUTDOWN}
        assert {cancel.request for cancel in cancels} == {each.request for each in scheduler.of_kind("submit")}
        await scheduler.wait_until(lambda: not scheduler.is_attached)


@pytest.mark.asyncio
async def test_calls_while_the_gateway_stops(prepared: PreparedModel) -> None:
    """A call that still comes through while streams are being ended is told when to try again (F3)."""
    async with running_stack(prepared) as stack:
        stack.gateway.live.close()
        for call in (
            stack.inference.GenerateOnce(inference_pb2.GenerateOnceRequest(request={"text": "a"})),
            stack.inference.Tokenize(inference_pb2.TokenizeRequest(text="a")),
            stack.inference.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[5])),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call
            error = from_rpc_error(raised.value)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
            assert error.retry_delay is not None
        assert stack.scheduler.of_kind("submit") == []


@pytest.mark.asyncio
async def test_stop_does_not_wait_for_a_client_that_does_not_read(prepared: PreparedModel) -> None:
    """A stream that cannot be written is cut after a while, and the scheduler hears of it like of the others."""
    scheduler = FakeScheduler(script=lambda submit, choice: [5] * 1000, auto=False)
    options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096))
    async with running_stack(prepared, scheduler, max_model_len=2000) as stack:
        address = f"127.0.0.1:{stack.gateway.port}"
        async with grpc.aio.insecure_channel(address, options=options) as narrow:
            request = inference_pb2.GenerateRequest(text="a", output={"top_logprobs": 20})
            call = inference_pb2_grpc.InferenceServiceStub(narrow).Generate(request)
            await scheduler.wait_received("submit")
            scheduler.step(600)
            await scheduler.wait_until(lambda: scheduler.acknowledged == scheduler.sequence)
            await asyncio.wait_for(stack.gateway.stop(), TIMEOUT)
            (cancel,) = await scheduler.wait_received("cancel")
            assert cancel.reason == scheduler_pb2.CANCEL_REASON_SHUTDOWN
            call.cancel()


@pytest.mark.asyncio
async def test_operators_see_a_gateway_that_stops(prepared: PreparedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Health says NOT_SERVING first; while streams are still ended operators are answered and the page can be read."""
    async with running_stack(prepared, FakeScheduler(auto=False)) as stack:
        await stack.wait_health(True, admin=True)
        call = stack.inference.Generate(inference_pb2.GenerateRequest(text="the cat"))
        await stack.scheduler.wait_received("submit")
        is_over = asyncio.Event()
        monkeypatch.setattr(server, "_STREAMS_END", TIMEOUT)
        with monkeypatch.context() as held:
            held.setattr(stack.gateway.live, "wait_empty", is_over.wait)
            stopping = asyncio.create_task(stack.gateway.stop())
            for admin in (False, True):
                await stack.wait_health(False, admin=admin)
        await stack.admin.GetLoad(admin_pb2.GetLoadRequest(), timeout=TIMEOUT)
        await read_to_error(call)
        page = await stack.scrape()
        assert endings_of(page) == {("cancelled", "shutdown"): 1}
        is_over.set()
        await asyncio.wait_for(stopping, TIMEOUT)
        with pytest.raises(grpc.aio.AioRpcError):
            await stack.admin.GetLoad(admin_pb2.GetLoadRequest(), timeout=TIMEOUT)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", stack.gateway.metrics_port))


@pytest.mark.asyncio
@pytest.mark.parametrize("field", ["port", "http_port", "admin_port", "metrics_port"])
async def test_taken_port(prepared: PreparedModel, field: str) -> None:
    """A port that another has is said by the name of its flag, and the gateway leaves the others as they were."""
    ports = dict(zip(("port", "http_port", "admin_port", "metrics_port"), take_ports(4), strict=True))
    with socket.create_server(("127.0.0.1", ports[field])):
        settings = GatewaySettings(model=prepared.name, scheduler="127.0.0.1:1", **ports)
        gateway = GatewayServer(settings, [prepared], Backoff(0.01, 0.02))
        with pytest.raises(PortTakenError, match=f"--{field.replace('_', '-')} "):
            await gateway.start()
        for name, port in ports.items():
            if name != field:
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", port))


async def read_to_error(call: Any) -> None:
    """Read the rest of a stream that must fail."""
    with pytest.raises(grpc.aio.AioRpcError):
        await read_to_end(call)


async def read_to_end(call: Any) -> None:
    """Read the rest of a stream."""
    while await call.read() is not grpc.aio.EOF:
        pass


class GatewayProcess:
    """`python -m gateway`, and what it logged."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []

    async def wait_line(self, message: str) -> dict[str, Any]:
        """Read the log up to a message and return its line."""
        async with asyncio.timeout(60):
            while True:
                line = await self.read_line()
                assert line is not None, f"the process ended before {message!r}: {self.lines}"
                if line["message"] == message:
                    return line

    async def read_line(self) -> dict[str, Any] | None:
        """Read one line of the log, None at its end. Anything but JSON fails."""
        assert self.process.stderr is not None
        text = await self.process.stderr.readline()
        if not text:
            return None
        self.lines.append(json.loads(text))
        return self.lines[-1]


@asynccontextmanager
async def gateway_process(model: Path | str, scheduler: str, *flags: str) -> AsyncIterator[GatewayProcess]:
    """Run the gateway as a process; kill it if it is still there."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OCTAVO_")}
    command = [sys.executable, "-m", "gateway", "--model", str(model), "--scheduler", scheduler, "--cell", CELL]
    command += ["--port", "0", "--http-port", "0", "--admin-port", "0", "--metrics-port", "0", *flags]
    process = await asyncio.create_subprocess_exec(
        *command,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    try:
        yield GatewayProcess(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.asyncio
async def test_sigterm_with_ten_streams(make_prepared: MakePrepared) -> None:
    """At SIGTERM each of ten streams ends with a status, the scheduler is told, the process exits with 0 (F3).

    The log has one JSON object a line, with the id of each request, its acceptance and its end.
    """
    prepared = make_prepared(chat_template=None)  # templates take their time to load
    scheduler = FakeScheduler(script=lambda submit, choice: [5] * 500, auto=False, pools=[pool_of(prepared)])
    await scheduler.start()
    async with gateway_process(prepared.path, scheduler.address) as gateway:
        port = (await gateway.wait_line("listening"))["port"]
        async with open_channel(f"127.0.0.1:{port}") as channel:
            watch: Any = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            while (await watch.read()).status != SERVING:
                pass
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            request = inference_pb2.GenerateRequest(text="the cat", request_id="mine")
            calls = [stub.Generate(request) for _ in range(10)]
            await scheduler.wait_received("submit", 10)
            scheduler.step(3)
            started = [(await call.read()).started for call in calls]
            await scheduler.wait_until(lambda: scheduler.acknowledged == scheduler.sequence)
            gateway.process.send_signal(signal.SIGTERM)
            assert (await watch.read()).status == NOT_SERVING
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await read_to_end(call)
                error = from_rpc_error(raised.value)
                assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
            watch.cancel()
        while await gateway.read_line() is not None:
            pass
        assert await asyncio.wait_for(gateway.process.wait(), TIMEOUT) == 0
    cancels = await scheduler.wait_received("cancel", 10)
    assert {cancel.reason for cancel in cancels} == {scheduler_pb2.CANCEL_REASON_SHUTDOWN}
    await scheduler.stop()
    by_message = {
        message: {line["request_id"]: line for line in gateway.lines if line["message"] == message}
        for message in ("request accepted", "request finished")
    }
    for event in started:
        accepted = by_message["request accepted"][event.request_id]
        assert (accepted["label"], accepted["model"]) == ("mine", prepared.name)
        assert accepted["prompt_tokens"] == event.prompt_tokens
        finished = by_message["request finished"][event.request_id]
        assert (finished["outcome"], finished["reason"]) == ("cancelled", "shutdown")
        assert (finished["error"], finished["completion_tokens"]) == ("SHUTTING_DOWN", 3)
        assert 0 <= finished["ttft_s"] <= finished["total_s"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model", "no-such-model"), "no model 'no-such-model'"),
        (("--bind", "256.0.0.1"), "cannot listen on 256.0.0.1"),
        (("--api-keys", "no-such-file"), "--api-keys='no-such-file': must be a file that can be read"),
        (("--chat-template", "no-such-file"), "--chat-template='no-such-file': must be a file that can be read"),
    ],
)
async def test_start_that_cannot_work(make_prepared: MakePrepared, flags: tuple[str, ...], words: str) -> None:
    """A model that is not there or an address that is not ours stops the process with one clear line."""
    prepared = make_prepared(chat_template=None)
    async with gateway_process(prepared.path, "127.0.0.1:1", *flags) as gateway:
        assert gateway.process.stderr is not None
        text = (await gateway.process.stderr.read()).decode()
        assert await gateway.process.wait() == 2
    assert text.strip().splitlines()[-1].startswith("gateway: error: ")
    assert words in text
    assert "Traceback" not in text


def test_import_needs_no_torch() -> None:
    """Nothing that the gateway imports brings torch in, not even a model with a chat template."""
    code = (
        "import sys, gateway.server, gateway.chat\n"
        "gateway.chat.ChatTemplate('{{ messages[0].content }}', {})\n"
        "assert 'torch' not in sys.modules and 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
