"""Executors that hang, fall silent or lose frames, health that means progress, and what an operator drains."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from wire_executor import TIMEOUT, FakeExecutor, expected_tokens
from wire_gateway import FakeGateway
from wire_scheduler import running_scheduler

from octavo.internal.executor.v1 import executor_pb2
from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.rpc.channel import open_channel
from octavo.rpc.errors import from_rpc_error
from octavo.rpc.seal import seal
from scheduler_svc.server import EXIT_OK

PROMPT = list(range(1, 9))
HANG = 0.3
INTERVAL = 0.02


class LivingExecutor(FakeExecutor):
    """Gives signs of life, unless it `is_silent`; its device moves while it `is_moving`."""

    def __init__(self, **welcome: Any) -> None:
        super().__init__(**welcome)
        self.is_silent = False
        self.is_moving = True
        self.num_signs = 0
        self.was_drained = False
        self._ticks = 1
        self._writing = asyncio.Lock()

    async def _run_steps(self, batches: asyncio.Queue[executor_pb2.StepBatch], session: int, context: Any) -> None:
        living = asyncio.create_task(self._live(context))
        try:
            await super()._run_steps(self._without_drains(batches), session, context)
        finally:
            living.cancel()
            await asyncio.gather(living, return_exceptions=True)

    def _without_drains(self, batches: asyncio.Queue[executor_pb2.StepBatch]) -> Any:
        executor = self

        class Steps:
            async def get(self) -> executor_pb2.StepBatch:
                while not (batch := await batches.get()).step:
                    executor.was_drained = True
                    executor.changed()
                return batch

        return Steps()

    async def _live(self, context: Any) -> None:
        while True:
            if not self.is_silent:
                self._ticks += self.is_moving
                async with self._writing:
                    await context.write(
                        executor_pb2.ExecuteResponse(progress=executor_pb2.Progress(num_ticks=self._ticks))
                    )
                self.num_signs += 1
                self.changed()
            await asyncio.sleep(INTERVAL)

    async def _answer(self, result: executor_pb2.StepResult, context: Any) -> None:
        async with self._writing:
            await super()._answer(result, context)


class ForgetfulExecutor(FakeExecutor):
    """Loses the answer to its second step, once."""

    async def _answer(self, result: executor_pb2.StepResult, context: Any) -> None:
        if result.step == 2 and self.num_sessions == 1:
            return
        await super()._answer(result, context)


class SealedExecutor(FakeExecutor):
    """Seals its frames but one, whose bytes are changed on the way."""

    async def _answer(self, result: executor_pb2.StepResult, context: Any) -> None:
        data = bytearray(seal(executor_pb2.ExecuteResponse(step_result=result)))
        if result.step == 3 and self.num_sessions == 1:
            data[len(data) // 2] ^= 1
        frame = executor_pb2.ExecuteResponse()
        with contextlib.suppress(Exception):
            frame.ParseFromString(bytes(data))
        await context.write(frame)


@pytest.mark.asyncio
async def test_a_device_that_does_not_move_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """Signs of life that always tell the same are no progress while steps wait: the sequences go on elsewhere. A first
    step has no longer than others: the time without progress that was seen is hardly more than the timeout.
    """
    stuck, other = LivingExecutor(), LivingExecutor()
    async with running_scheduler(stuck, other, hang_timeout=HANG) as scheduler:
        gateway = await scheduler.ready_gateway(2)
        stuck.hold()
        stuck.is_moving = False
        for counter in range(1, 5):
            await gateway.submit(counter, [counter, *PROMPT], 20)
        await gateway.over(1, 2, 3, 4)
        for counter in range(1, 5):
            assert gateway.outcomes[counter].tokens[0] == expected_tokens([counter, *PROMPT], 20)
        stuck.release()
    told = [getattr(record, "fields", {}).get("error", "") for record in caplog.records]
    seconds = [
        float(match[1]) for error in told if (match := re.fullmatch(r"no sign of progress for ([\d.]+) s", error))
    ]
    assert seconds
    assert all(HANG <= each < 2 * HANG for each in seconds)


@pytest.mark.asyncio
async def test_a_slow_device_is_not_given_up() -> None:
    """While it moves a step may take many times the timeout."""
    slow = LivingExecutor()
    async with running_scheduler(slow, hang_timeout=HANG) as scheduler:
        gateway = await scheduler.ready_gateway()
        slow.hold()
        await gateway.submit(1, PROMPT, 5)
        await slow.until(lambda: len(slow.batches) > 0)
        enough = slow.num_signs + int(4 * HANG / INTERVAL)
        await slow.until(lambda: slow.num_signs > enough)
        assert slow.num_sessions == 1
        slow.release()
        await gateway.over(1)
        assert gateway.outcomes[1].tokens[0] == expected_tokens(PROMPT, 5)


@pytest.mark.asyncio
async def test_a_silent_executor_is_dialled_again() -> None:
    """Once it has given signs of life it must go on giving them, with work or without."""
    executor = LivingExecutor()
    async with running_scheduler(executor, hang_timeout=HANG) as scheduler:
        await scheduler.ready_gateway()
        await executor.until(lambda: executor.num_signs > 2)
        executor.is_silent = True
        await executor.until(lambda: executor.num_sessions > 1)
        executor.is_silent = False


@pytest.mark.asyncio
@pytest.mark.parametrize("make", [ForgetfulExecutor, SealedExecutor])
async def test_a_lost_or_damaged_frame_costs_a_session_and_no_token(make: type[FakeExecutor]) -> None:
    """An answer behind one that is missing, or whose bytes are not those that were sent: all begins anew, exactly."""
    executor = make()
    async with running_scheduler(executor) as scheduler:
        gateway = await scheduler.ready_gateway()
        for counter in range(1, 4):
            await gateway.submit(counter, [counter, *PROMPT], 20, n=2)
        await gateway.over(1, 2, 3)
        assert executor.num_sessions >= 2
        for counter in range(1, 4):
            for choice in (0, 1):
                expected = expected_tokens([counter, *PROMPT], 20, choice=choice)
                assert gateway.outcomes[counter].tokens[choice] == expected


@pytest.mark.asyncio
async def test_health_means_progress(caplog: pytest.LogCaptureFixture) -> None:
    """NOT_SERVING while work waits and nothing commits, SERVING again with the first commit; one dump for the stall."""
    executor = LivingExecutor()
    async with running_scheduler(executor, stall_timeout=HANG) as scheduler:
        gateway = await scheduler.ready_gateway()
        executor.hold()
        async with open_channel(f"127.0.0.1:{scheduler.port}") as channel, asyncio.timeout(TIMEOUT):
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""))

            async def until(status: int) -> None:
                while (await watch.read()).status != status:
                    pass

            await until(health_pb2.HealthCheckResponse.SERVING)
            await gateway.submit(1, PROMPT, 5)
            await until(health_pb2.HealthCheckResponse.NOT_SERVING)
            executor.release()
            await until(health_pb2.HealthCheckResponse.SERVING)
            watch.cancel()
        await gateway.over(1)
    (dump,) = [record for record in caplog.records if record.message == "work waits and nothing commits"]
    assert "num_waiting" in dump.fields["load"]  # type: ignore[attr-defined]


@pytest.mark.asyncio
async def test_an_operator_drains() -> None:
    """An executor and a gateway are told, what is not there is NOT_FOUND, and the scheduler itself ends with code 0."""
    executor = LivingExecutor()
    async with running_scheduler(executor) as scheduler:
        gateway = await scheduler.ready_gateway()
        await gateway.stub.Drain(scheduler_pb2.DrainRequest(executor=executor.address))
        await executor.until(lambda: executor.was_drained)
        await gateway.stub.Drain(scheduler_pb2.DrainRequest(gateway=gateway.incarnation))
        await gateway.until(lambda: any(frame.HasField("drain_gateway") for frame in gateway.frames))
        for nobody in (scheduler_pb2.DrainRequest(executor="127.0.0.1:1"), scheduler_pb2.DrainRequest(gateway="none")):
            assert await _code_of(gateway, nobody) is grpc.StatusCode.NOT_FOUND
        assert await _code_of(gateway, scheduler_pb2.DrainRequest()) is grpc.StatusCode.INVALID_ARGUMENT
        await gateway.stub.Drain(scheduler_pb2.DrainRequest(scheduler=True))
        assert await scheduler.exit_code() == EXIT_OK


async def _code_of(gateway: FakeGateway, request: scheduler_pb2.DrainRequest) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await gateway.stub.Drain(request)
    return from_rpc_error(raised.value).code
