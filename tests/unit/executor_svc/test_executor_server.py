"""The executor as a whole: start, health, stop, death, and what keeps it from starting."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from factories import make_llama
from grpc_health.v1 import health_pb2, health_pb2_grpc

from executor_svc import load as load_module
from executor_svc.kernels.sets.triton import GpuUnusableError
from executor_svc.model_runner import ModelRunner
from executor_svc.server import EXIT_FAILED, EXIT_OK, SERVICE_NAME, ExecutorServer
from octavo.internal.executor.v1 import executor_pb2 as pb
from octavo.internal.executor.v1 import executor_pb2_grpc, sequence_pb2
from octavo.models import ModelError, open_prepared
from octavo.models.prepare import prepare
from octavo.rpc.channel import open_channel
from octavo.rpc.errors import from_rpc_error
from octavo.rpc.server import PortTakenError
from octavo.rpc.settings import SettingsError
from octavo.settings import ExecutorSettings

TIMEOUT = 30.0
SLOW_START = 240.0
"""Seconds for a process that imports torch on a machine with other work."""
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(name="model", scope="module")
def _model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A prepared tiny model."""
    folder = make_llama(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=128)
    prepare(str(folder), report=lambda line: None)
    return str(folder)


def _settings(model: str, **changes: Any) -> ExecutorSettings:
    fields: dict[str, Any] = {
        "port": 0,
        "metrics_port": 0,
        "dtype": "float32",
        "threads": 1,
        "max_num_seqs": 4,
        "block_size": 8,
    }
    return ExecutorSettings(model=model, **{**fields, **changes})


def _device_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "device"]


async def _result(call: Any) -> pb.StepResult:
    """The next result; signs of life are passed over."""
    while True:
        frame = await asyncio.wait_for(call.read(), TIMEOUT)
        if frame.WhichOneof("frame") != "progress":
            result: pb.StepResult = frame.step_result
            return result


async def _begin(channel: grpc.aio.Channel) -> tuple[Any, pb.Welcome]:
    """Open a session; return the call and what Welcome said."""
    call = executor_pb2_grpc.ExecutorServiceStub(channel).Execute()
    welcome = (await asyncio.wait_for(call.read(), TIMEOUT)).welcome
    await call.write(pb.ExecuteRequest(begin=pb.Begin(term=1, session=1)))
    assert (await asyncio.wait_for(call.read(), TIMEOUT)).ready.session == 1
    return call, welcome


def _first_step() -> pb.ExecuteRequest:
    sequence = pb.NewSequence(
        handle=1,
        token_ids=[5, 6, 7],
        num_prompt_tokens=3,
        sampling=sequence_pb2.SamplingParams(top_p=1, repetition_penalty=1),
        stopping=sequence_pb2.StoppingParams(max_tokens=4),
    )
    return pb.ExecuteRequest(
        step_batch=pb.StepBatch(
            session=1,
            step=1,
            new_sequences=[sequence],
            handles=[1],
            num_scheduled_tokens=[3],
            num_computed_tokens=[0],
            num_new_blocks=[1],
            new_blocks=[1],
        )
    )


async def _health(channel: grpc.aio.Channel, service: str) -> int:
    response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    status: int = response.status
    return status


@pytest.mark.asyncio
async def test_start_serve_stop(model: str) -> None:
    """A started executor says SERVING and who it is, runs a step, and at the stop ends its stream with UNAVAILABLE,
    returns 0, and leaves no thread.
    """
    prepared = open_prepared(model)
    server = ExecutorServer(_settings(model, cell="blue"))
    await server.start()
    stop = asyncio.Event()
    running = asyncio.create_task(server.run(stop.wait()))
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        assert [await _health(channel, name) for name in ("", SERVICE_NAME)] == [SERVING, SERVING]
        call, welcome = await _begin(channel)
        assert (welcome.cell, welcome.model_name) == ("blue", prepared.name)
        assert (welcome.model_revision, welcome.tokenizer_hash) == (prepared.revision, prepared.tokenizer_hash)
        assert (len(welcome.incarnation), len(welcome.fingerprint)) == (32, 64)
        assert (welcome.block_size, welcome.num_blocks, welcome.max_model_len) == (8, 4 * 16 + 1, 128)
        await call.write(_first_step())
        result = await _result(call)
        assert list(result.statuses) == [pb.ROW_STATUS_OK]
        assert 0 <= result.token_ids[0] < welcome.vocab_size
        stop.set()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _result(call)
        error = from_rpc_error(caught.value)
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "STOPPING")
        assert error.retry_delay is not None
    assert await asyncio.wait_for(running, TIMEOUT) == EXIT_OK
    assert _device_threads() == []


@pytest.mark.asyncio
async def test_death_of_the_device_thread(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the device thread dies health says NOT_SERVING, the stream ends with UNAVAILABLE, run returns 1."""

    def die(self: ModelRunner, batch: object) -> None:
        raise SystemError("the device is gone")

    server = ExecutorServer(_settings(model))
    await server.start()
    monkeypatch.setattr(ModelRunner, "run", die)
    stop = asyncio.Event()
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        assert (await asyncio.wait_for(watch.read(), TIMEOUT)).status == SERVING
        call, _ = await _begin(channel)
        await call.write(_first_step())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _result(call)
        error = from_rpc_error(caught.value)
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DEVICE_FAILED")
        assert (await asyncio.wait_for(watch.read(), TIMEOUT)).status == NOT_SERVING
        watch.cancel()
    assert await asyncio.wait_for(server.run(stop.wait()), TIMEOUT) == EXIT_FAILED
    assert _device_threads() == []


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"device": "cuda"}, SettingsError, "--device cuda: torch .* (built for CPUs alone|finds no GPU)"),
        ({"kernels": "reference", "deterministic": True}, SettingsError, "--deterministic: .*--kernels reference"),
        ({"kernels": "triton"}, SettingsError, "--kernels triton: these kernels run on GPUs, not on cpu"),
        ({"kernels": "none"}, SettingsError, "--kernels none: unknown kernel set .*reference, cpu"),
        ({"max_model_len": 129}, SettingsError, "--max-model-len 129: the model ends at 128 tokens"),
        ({"kv_memory": 1000}, SettingsError, "--kv-memory 1000 bytes"),
        ({"model": "/nowhere/model"}, ModelError, "/nowhere/model"),
    ],
)
async def test_what_cannot_start(model: str, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    """A setting that does not fit, or a model that is not there, is an error that names it; no thread is left."""
    server = ExecutorServer(_settings(**{"model": model, **changes}))
    with pytest.raises(error, match=message):
        await server.start()
    assert _device_threads() == []


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernels": "cpu"}, "--kernels cpu: these kernels run on CPUs; take triton with --device cuda, or reference"),
        ({"profile_ops": True}, "--profile-ops: ops are timed on the host, .* set --device cpu"),
    ],
)
async def test_what_does_not_go_with_a_gpu(
    model: str, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is one, settings that do not go with it are named before anything is loaded."""
    monkeypatch.setattr(load_module, "find_gpu", lambda device: None)
    with pytest.raises(SettingsError, match=message):
        await ExecutorServer(_settings(model, device="cuda", **changes)).start()
    assert _device_threads() == []


@pytest.mark.asyncio
async def test_what_a_gpu_lacks_is_said_by_the_flag(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with the card is told of --device, what is wrong with Triton of --kernels, as text and no more."""

    def wanting(device: object) -> None:
        raise GpuUnusableError("a card has compute capability 7.5; these kernels need 8.0")

    monkeypatch.setattr(load_module, "find_gpu", wanting)
    with pytest.raises(SettingsError, match=r"^--device cuda: a card has compute capability 7\.5; .* need 8\.0$"):
        await ExecutorServer(_settings(model, device="cuda")).start()

    def old(*arguments: object) -> None:
        raise GpuUnusableError("Triton 3.5.1 is too old; install triton>=3.6")

    monkeypatch.setattr(load_module, "find_gpu", lambda device: None)
    monkeypatch.setattr(load_module, "build_kernels", old)
    with pytest.raises(SettingsError, match=r"^--kernels triton: Triton 3\.5\.1 is too old; install triton>=3\.6$"):
        await ExecutorServer(_settings(model, device="cuda")).start()
    assert _device_threads() == []


@pytest.mark.asyncio
async def test_too_little_kv_memory_is_said_before_the_weights(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What config and flag say is enough to know; weights can take minutes to read."""
    monkeypatch.setattr(load_module, "load_model", lambda *_: pytest.fail("the weights were read"))
    with pytest.raises(SettingsError, match="--kv-memory 1000 bytes"):
        await ExecutorServer(_settings(model, kv_memory=1000)).start()
    assert _device_threads() == []


@pytest.mark.asyncio
async def test_a_taken_port(model: str) -> None:
    """A port in use is an error once the model is loaded, and the device thread goes away again."""
    first = ExecutorServer(_settings(model))
    await first.start()
    second = ExecutorServer(_settings(model, port=first.port))
    with pytest.raises(PortTakenError, match=str(first.port)):
        await second.start()
    assert len(_device_threads()) == 1
    await first.stop()
    assert _device_threads() == []


def _process(*flags: str) -> subprocess.Popen[str]:
    root = Path(__file__).parents[3]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
    return subprocess.Popen(
        [sys.executable, "-m", "executor_svc", *flags], cwd=root, env=environ, stderr=subprocess.PIPE, text=True
    )


def test_the_process_serves_and_ends_with_sigterm(model: str) -> None:
    """`python -m executor_svc` logs one line with its figures when it serves, and SIGTERM ends it with 0."""
    process = _process(
        "--model",
        model,
        "--port",
        "0",
        "--metrics-port",
        "0",
        "--dtype",
        "float32",
        "--threads",
        "1",
        "--max-num-seqs",
        "2",
    )
    with process, contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        assert process.stderr is not None
        lines = map(json.loads, process.stderr)
        figures = next(line for line in lines if line["message"] == "executor serving")
        assert figures["port"] > 0
        assert (figures["dtype"], figures["threads"], figures["max_num_seqs"]) == ("float32", 1, 2)
        assert figures["kv_tokens"] == (figures["num_blocks"] - 1) * figures["block_size"]
        process.send_signal(signal.SIGTERM)
        rest = list(lines)
        assert process.wait(TIMEOUT) == 0
        assert [line["level"] for line in rest] == ["info"]


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [("--device", "cuda:x", "--device='cuda:x'"), ("--max-model-len", "129", "--max-model-len 129: the model ends at")],
)
def test_the_process_says_what_keeps_it_from_starting(model: str, flag: str, value: str, told: str) -> None:
    """A setting that cannot be, or does not fit the model, ends the process with 2 and one line that names it."""
    with _process("--model", model, "--port", "0", "--metrics-port", "0", flag, value) as process:
        try:
            # torch is imported on the way, for minutes where the machine is busy.
            _, errors = process.communicate(timeout=SLOW_START)
        finally:
            process.kill()
    assert process.returncode == 2
    assert told in errors
    assert "Traceback" not in errors
