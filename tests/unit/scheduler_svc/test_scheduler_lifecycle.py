"""Start, health, stop and failure of the whole scheduler."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from wire_executor import MODEL, TIMEOUT, FakeExecutor, expected_tokens
from wire_gateway import FakeGateway
from wire_scheduler import RunningScheduler, running_scheduler

from octavo.rpc.channel import open_channel
from octavo.rpc.errors import from_rpc_error
from scheduler_svc.__main__ import main
from scheduler_svc.batch import BatchResult, Event
from scheduler_svc.engine import Engine
from scheduler_svc.policies.registry import load_policy
from scheduler_svc.server import EXIT_FAILED, EXIT_OK
from scheduler_svc.servicer import SERVICE_NAME

PROMPT = list(range(1, 11))
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def status_changes(port: int, service: str, count: int, has_begun: asyncio.Event | None = None) -> list[int]:
    """Return the first `count` statuses that a health watch tells; `has_begun` is set at the first."""
    statuses = []
    async with open_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(TIMEOUT):
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))
        while len(statuses) < count:
            statuses.append((await call.read()).status)
            if has_begun is not None:
                has_begun.set()
        call.cancel()
    return statuses


@pytest.mark.asyncio
@pytest.mark.parametrize("service", ["", SERVICE_NAME, f"model/{MODEL}"])
async def test_health_follows_the_executors(service: str) -> None:
    """NOT_SERVING before an executor is ready, SERVING while one is, NOT_SERVING once the last has gone."""
    executor = await FakeExecutor().start()
    try:
        addresses: list[str] = []

        async def resolver(host: str, port: int) -> list[str]:
            return addresses

        async with running_scheduler(resolver=resolver, term_patience=0) as scheduler:
            watch = asyncio.ensure_future(status_changes(scheduler.port, service, 3))
            gateway = await scheduler.gateway()
            addresses = [executor.address]
            await gateway.until_load(lambda load: len(load.executors) == 1)
            await executor.stop()
            statuses = await watch
            unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            assert statuses == [unknown if service.startswith("model/") else NOT_SERVING, SERVING, NOT_SERVING]
    finally:
        await executor.stop()


@pytest.mark.asyncio
async def test_stopping_ends_every_stream_with_a_status() -> None:
    """Ten gateways with live requests are each told UNAVAILABLE, the executor's stream ends, and the exit code is 0."""
    executor = FakeExecutor()
    async with running_scheduler(executor) as scheduler:
        await scheduler.ready_gateway()
        gateways = [await scheduler.gateway() for _ in range(10)]
        for gateway in gateways:
            # grpc turns the status of a stream that ends during a write into INTERNAL.
            gateway.acknowledges = False
            await gateway.submit(1, PROMPT, 240)
            await gateway.submit(2, PROMPT * 20, 20)
        await gateways[0].until(lambda: bool(gateways[0].outcomes[1].tokens))
        assert await scheduler.stop() == EXIT_OK
        for gateway in gateways:
            status = await gateway.ended()
            assert status is not None
            error = from_rpc_error(status)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "SCHEDULER_STOPPING")
        await executor.until(lambda: executor.num_streams == 0)


@pytest.mark.asyncio
async def test_sigterm_ends_the_process_in_order(tmp_path: Path) -> None:
    """The real process, with streams live: health turns, gateways get UNAVAILABLE,
    logs are JSON with request ids, exit 0.
    """
    executor = await FakeExecutor().start()
    log = tmp_path / "log"
    arguments = ["--port", "0", "--metrics-port", "0", "--executors", executor.address, "--check-invariants"]
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "scheduler_svc", *arguments, stderr=stderr, cwd=Path(__file__).parents[3]
        )
    gateway: FakeGateway | None = None
    try:
        await executor.until(lambda: executor.num_sessions == 1)
        [listening] = [line for line in lines_of(log) if line["message"] == "scheduler listening"]
        gateway = FakeGateway(int(listening["port"]))
        await gateway.attach()
        is_watched = asyncio.Event()
        watch = asyncio.ensure_future(status_changes(int(listening["port"]), SERVICE_NAME, 2, is_watched))
        await asyncio.wait_for(is_watched.wait(), TIMEOUT)
        await gateway.submit(1, PROMPT, 3)
        await gateway.over(1)
        gateway.acknowledges = False
        await gateway.submit(2, PROMPT, 240)
        await gateway.until(lambda: bool(gateway.outcomes[2].tokens))
        process.send_signal(signal.SIGTERM)
        status = await gateway.ended()
        assert status is not None
        assert status.code() is grpc.StatusCode.UNAVAILABLE
        async with asyncio.timeout(TIMEOUT):
            assert await process.wait() == EXIT_OK
        assert await watch == [SERVING, NOT_SERVING]
        assert gateway.outcomes[1].tokens == {0: expected_tokens(PROMPT, 3)}
        told = [line for line in lines_of(log) if line.get("request_id") == f"{gateway.incarnation}-1"]
        assert [line["message"] for line in told] == ["request accepted", "request finished"]
        assert (told[1]["prompt_tokens"], told[1]["completion_tokens"], told[1]["reasons"]) == (10, 3, ["length"])
        assert 0 <= told[1]["queue_seconds"] <= told[1]["first_token_seconds"] <= told[1]["seconds"]
        assert not [line for line in lines_of(log) if line["level"] in ("error", "critical")]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        if gateway is not None:
            await gateway.close()
        await executor.stop()


def lines_of(log: Path) -> list[dict[str, Any]]:
    """Return the log lines written so far."""
    return [json.loads(line) for line in log.read_text().splitlines()]


class FailingEngine(Engine):
    """Fails at the tenth result, as no engine ever should."""

    results = 0

    def update(self, session: int, result: BatchResult, now: float) -> list[Event]:
        self.results += 1
        if self.results == 10:
            raise KeyError("a corrupt table")
        return super().update(session, result, now)


@pytest.mark.asyncio
async def test_a_failed_engine_ends_the_process(caplog: pytest.LogCaptureFixture) -> None:
    """An exception in the engine is logged with its batch, the streams end with UNAVAILABLE,
    and the exit code is not 0.
    """
    engine = FailingEngine(load_policy("fcfs"), 2)
    async with running_scheduler(FakeExecutor(), engine=engine) as scheduler:
        gateway = await scheduler.ready_gateway()
        gateway.acknowledges = False
        await gateway.submit(1, PROMPT, 100)
        assert await scheduler.exit_code() == EXIT_FAILED
        status = await gateway.ended()
        assert status is not None
        assert status.code() is grpc.StatusCode.UNAVAILABLE
        [record] = [record for record in caplog.records if record.levelno == logging.CRITICAL]
        fields = record.fields  # type: ignore[attr-defined]
        assert fields["call"] == "update"
        assert "ScheduledBatch" in fields["batch"]
        assert "a corrupt table" in caplog.text
        scheduler.expected_code = EXIT_FAILED


class BrokenLedgerEngine(Engine):
    """Finds its ledger broken once it has run something."""

    def check_invariants(self) -> None:
        super().check_invariants()
        assert self.load().executors == () or self.load().executors[0].num_steps < 3, "a block has two owners"


@pytest.mark.asyncio
@pytest.mark.parametrize("always", [True, False])
async def test_a_broken_invariant_ends_the_process(always: bool) -> None:
    """Invariants are checked after every event where that is asked for, and on idle always."""
    engine = BrokenLedgerEngine(load_policy("fcfs"), 2)
    executor = FakeExecutor()
    async with running_scheduler(executor, engine=engine, check_invariants=always) as scheduler:
        gateway = await scheduler.ready_gateway()
        await gateway.submit(1, PROMPT, 30)
        assert await scheduler.exit_code() == EXIT_FAILED
        scheduler.expected_code = EXIT_FAILED
        assert (executor.num_tokens < len(PROMPT) + 29) == always


@pytest.mark.asyncio
async def test_nothing_is_left_behind() -> None:
    """After runs with work, breaks and live streams at the stop no task, thread or descriptor is left."""

    async def one_run() -> None:
        executors = [FakeExecutor(), FakeExecutor()]
        async with running_scheduler(*executors) as scheduler:
            gateway = await scheduler.ready_gateway(2)
            lost = await scheduler.gateway()
            await lost.submit(1, PROMPT, 240)
            await gateway.submit(1, PROMPT, 10)
            await gateway.over(1)
            await gateway.submit(2, PROMPT, 240)
            executors[0].break_streams()
            await lost.break_stream()
            await stop_with_live_stream(scheduler)

    async def stop_with_live_stream(scheduler: RunningScheduler) -> None:
        assert await scheduler.stop() == EXIT_OK

    def counts() -> tuple[int, int]:
        gc.collect()
        # Those of the loop's own pool come with look-ups of names, up to a number, and end with the loop.
        threads = [thread for thread in threading.enumerate() if not thread.name.startswith("asyncio_")]
        return len(threads), len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    # The first run starts what grpc keeps for the life of the process.
    await one_run()
    before = counts()
    for _ in range(3):
        await one_run()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    # grpc's own threads and sockets end in their own time.
    async with asyncio.timeout(TIMEOUT):
        while any(now > then for now, then in zip(counts(), before, strict=True)):
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--executors", "nowhere"], "--executors='nowhere': must be host:port, or several"),
        (["--executors", ","], "--executors=',': must be host:port"),
        (["--policy", "no-such-policy"], "no-such-policy"),
        (["--bind", "192.0.2.1"], "cannot listen on 192.0.2.1"),
        (["--bind", "192.0.2.1", "--metrics-port", "9"], "cannot listen on 192.0.2.1:9 for metrics"),
    ],
)
def test_a_bad_start_says_what_is_wrong(
    arguments: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be started ends with exit code 2 and one line that names the fault."""
    monkeypatch.setattr(sys, "argv", ["scheduler_svc", "--port", "0", "--metrics-port", "0", *arguments])
    with pytest.raises(SystemExit) as raised:
        main()
    assert raised.value.code == 2
    assert complaint in capsys.readouterr().err.splitlines()[-1]
