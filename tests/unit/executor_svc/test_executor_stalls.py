"""A device that hangs: what health and the log say of it, and that it keeps no executor from its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import pytest
from executor_stack import Peer, first_step
from factories import make_llama
from grpc_health.v1 import health_pb2, health_pb2_grpc

from executor_svc.batch import StepBatch, StepResult
from executor_svc.model_runner import ModelRunner
from executor_svc.server import EXIT_HUNG, EXIT_OK, SERVICE_NAME, ExecutorServer
from octavo.internal.executor.v1 import executor_pb2_grpc
from octavo.models.prepare import prepare
from octavo.rpc.channel import open_channel
from octavo.settings import ExecutorSettings

TIMEOUT = 30.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
ROOT = Path(__file__).parents[3]


@pytest.fixture(name="model", scope="module")
def _model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A prepared tiny model."""
    folder = make_llama(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=128)
    prepare(str(folder), report=lambda line: None)
    return str(folder)


class Gate:
    """Where steps hang on the device while it is closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self._open.set()
        self._reached = threading.Event()
        run = ModelRunner.run

        def run_behind(runner: ModelRunner, batch: StepBatch) -> StepResult:
            self._reached.set()
            assert self._open.wait(TIMEOUT)
            return run(runner, batch)

        monkeypatch.setattr(ModelRunner, "run", run_behind)

    def close(self) -> None:
        """Have steps hang."""
        self._open.clear()
        self._reached.clear()

    async def reached(self) -> None:
        """Wait until a step hangs: one that has not begun when its session ends is not run at all."""
        assert await asyncio.to_thread(self._reached.wait, TIMEOUT)

    def open(self) -> None:
        """Have them go on."""
        self._open.set()

    async def leave(self) -> None:
        """Have them go on, and wait for the end of the thread that runs them."""
        self.open()
        for thread in threading.enumerate():
            if thread.name == "device":
                await asyncio.to_thread(thread.join, TIMEOUT)
                assert not thread.is_alive()


@pytest.fixture(name="gate")
def _gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


async def begin(channel: grpc.aio.Channel) -> Peer:
    """Open a session and send a step."""
    peer = Peer(executor_pb2_grpc.ExecutorServiceStub(channel))
    await peer.begin(1, 1)
    await peer.write(step_batch=first_step(session=1))
    return peer


def settings(model: str) -> ExecutorSettings:
    """Return settings under which a stall is soon told."""
    return ExecutorSettings(
        model=model, port=0, metrics_port=0, dtype="float32", threads=1, block_size=8, stall_timeout=0.4
    )


@pytest.mark.asyncio
async def test_health_means_that_the_device_moves(model: str, gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    """A step that hangs turns every service NOT_SERVING, and where the device stands is told once; the step's end
    turns them back. Idle is healthy.
    """
    caplog.set_level(logging.WARNING)
    server = ExecutorServer(settings(model))
    await server.start()
    gate.close()
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        watches = [
            health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT)
            for name in ("", SERVICE_NAME)
        ]
        assert [(await watch.read()).status for watch in watches] == [SERVING, SERVING]
        # Longer than the bound, in which nothing is asked of the device.
        await asyncio.sleep(1.0)
        peer = await begin(channel)
        assert [(await watch.read()).status for watch in watches] == [NOT_SERVING, NOT_SERVING]
        await asyncio.sleep(1.0)
        gate.open()
        assert [(await watch.read()).status for watch in watches] == [SERVING, SERVING]
        for watch in watches:
            watch.cancel()
        peer.call.cancel()
    assert await server.stop()
    told = [(record.levelname, record.getMessage()) for record in caplog.records if "device" in record.getMessage()]
    assert told == [("ERROR", "the device makes no progress"), ("WARNING", "the device goes on")]
    [dump] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "run_behind" in str(dump.__dict__["fields"]["stack"])


@pytest.mark.parametrize("is_slow", [False, True], ids=["hangs", "moves"])
@pytest.mark.asyncio
async def test_a_stop_waits_for_a_device_that_moves_and_for_no_other(
    model: str, gate: Gate, is_slow: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Told to stop while a step runs: the stream ends at once in any case. What moves is waited for beyond the bound;
    what hangs is left, told of, and has an exit code of its own.
    """
    server = ExecutorServer(settings(model))
    await server.start()
    gate.close()
    stop = asyncio.Event()
    running = asyncio.create_task(server.run(stop.wait()))
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        peer = await begin(channel)
        await gate.reached()
        stop.set()
        assert (await peer.end()).reason == "STOPPING"
    if is_slow:
        moving = asyncio.create_task(_move(server, running))
        await asyncio.sleep(2.0)
        assert not running.done()
        gate.open()
        await moving
    assert await asyncio.wait_for(running, TIMEOUT) == (EXIT_OK if is_slow else EXIT_HUNG)
    hung = [record for record in caplog.records if "is not waited for" in record.getMessage()]
    assert len(hung) == (0 if is_slow else 1)
    await gate.leave()
    server._load.stop()


async def _move(server: ExecutorServer, running: asyncio.Task[int]) -> None:
    """Have the device show progress until its executor has stopped, on a machine with other work too."""
    while not running.done():
        server._ticks.tick()
        await asyncio.sleep(0.05)


def start_hung(model: str) -> subprocess.Popen[str]:
    """Start the program whose every step hangs."""
    flags = ["--model", model, "--port", "0", "--metrics-port", "0", "--dtype", "float32", "--threads", "1"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
    environ["PYTHONPATH"] = str(ROOT)
    program = [sys.executable, str(ROOT / "tests" / "hung_executor.py"), *flags, "--stall-timeout", "0.5"]
    return subprocess.Popen(program, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True)


@pytest.mark.asyncio
async def test_the_process_of_a_device_that_hangs_ends_with_sigterm(model: str) -> None:
    """Python would wait for the device's thread, for ever: one signal is enough all the same."""
    process = start_hung(model)
    with process, contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        assert process.stderr is not None
        lines = map(json.loads, process.stderr)
        figures = await asyncio.to_thread(lambda: next(line for line in lines if line["message"] == "executor serving"))
        async with open_channel(f"127.0.0.1:{figures['port']}") as channel:
            peer = await begin(channel)
            await asyncio.to_thread(
                lambda: next(line for line in lines if line["message"] == "the device makes no progress")
            )
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, TIMEOUT) == EXIT_HUNG
            peer.call.cancel()
