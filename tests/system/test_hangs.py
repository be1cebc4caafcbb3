"""Executors that stop, hang or kill: health that means progress, fencing of those that wake, one poisonous request."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import sys
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from poisoned_executor import POISON
from reference import Reference
from stack import TIMEOUT, ProcessStack, get_load, plan_processes, processes, wait_idle, wait_serving
from stack_client import request_for

import octavo
from octavo.models.prepared import PreparedModel
from octavo.rpc.channel import open_channel
from octavo.v1 import inference_pb2_grpc

LENGTH = 500
PROMPTS = [[5 + index, 6, 7] for index in range(4)]


@pytest.mark.asyncio
@pytest.mark.timeout(200)
async def test_a_stopped_executor_and_an_older_scheduler_are_fenced(
    tiny_model: PreparedModel, reference: Reference, tmp_path: Path
) -> None:
    """F1: SIGSTOP with running requests turns gateway and scheduler NOT_SERVING, SIGCONT turns them back; idle is
    healthy. What the waking one had been told before changes nothing: streams go on from the record, token for token.
    Of two schedulers of the cell the older then ends, with a code of its own.
    """
    flags = {"hang_timeout": "1", "stall_timeout": "1", "log_level": "info"}
    async with processes(tiny_model, tmp_path, flags=flags) as stack:
        async with open_channel(stack.gateway_address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            calls = [stub.Generate(request_for(prompt, LENGTH, ignore_eos=True)) for prompt in PROMPTS]
            starts = await asyncio.gather(*(_first_tokens(call) for call in calls))
            stack.signal("executor-0", signal.SIGSTOP)
            await wait_serving(stack.gateway_address, serving=False)
            await wait_serving(stack.scheduler_address, serving=False)
            stack.signal("executor-0", signal.SIGCONT)
            await wait_serving(stack.scheduler_address)
            await wait_serving(stack.gateway_address)
            async with asyncio.timeout(TIMEOUT):
                rests = await asyncio.gather(*(_rest(call) for call in calls))
        for prompt, start, rest in zip(PROMPTS, starts, rests, strict=True):
            assert len(start) + len(rest) == LENGTH
            reference.check_greedy(prompt, [*start, *rest])
        load = await wait_idle(stack)
        assert load.num_desyncs == 0
        assert '"loss": "hung"' in stack.log_of("scheduler")
        await _start_second_scheduler(stack, tiny_model, tmp_path)


async def _start_second_scheduler(stack: ProcessStack, model: PreparedModel, folder: Path) -> None:
    """Start another scheduler for the cell: it takes the executors over, and the first stops by itself."""
    second = plan_processes(model, folder / "second")
    (folder / "second").mkdir()
    second.use_executors_of(stack)
    second.start("scheduler")
    try:
        assert await stack.wait_exit("scheduler") == 3
        assert "a newer scheduler owns the cell" in stack.log_of("scheduler")
        async with asyncio.timeout(TIMEOUT):
            while len((await get_load(second)).executors) < 1:
                await asyncio.sleep(0.01)
    finally:
        second.stop_all()


@pytest.mark.full
@pytest.mark.asyncio
@pytest.mark.timeout(600)
async def test_one_poisonous_request_fails_alone(
    tiny_model: PreparedModel, reference: Reference, tmp_path: Path
) -> None:
    """Executors die of it until two died of it alone: it ends with POISON, the innocents end well."""
    stack = plan_processes(tiny_model, tmp_path, flags={"orphan_timeout": "120"})
    _poison(stack)
    stack.start_all()
    keeper = asyncio.create_task(_keep_alive(stack))
    prompts = [*([9 + index, 4, 3] for index in range(63)), [9, POISON, 3]]
    try:
        await wait_serving(stack.gateway_address)
        async with octavo.AsyncClient(stack.gateway_address) as client, asyncio.timeout(5 * TIMEOUT):
            results = await asyncio.gather(*(_read(client, prompt) for prompt in prompts), return_exceptions=True)
        *innocents, guilty = results
        assert isinstance(guilty, octavo.ServiceError), guilty
        assert (guilty.code, guilty.reason) == (grpc.StatusCode.INTERNAL, "POISON")
        for prompt, output in zip(prompts, innocents, strict=False):
            assert not isinstance(output, BaseException), output
            assert len(output) == 40
            reference.check_greedy(prompt, output)
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        stack.stop_all()


async def _read(client: octavo.AsyncClient, prompt: list[int]) -> list[int]:
    """Return a request's tokens. What comes while the only executor is dead is asked again, for as long as it takes."""
    tokens: list[int] = []
    options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "temperature": 0, "resume_grace": 5 * TIMEOUT}
    async for delta in client.generate(prompt, **options):
        tokens.extend(delta.token_ids)
    return tokens


def _poison(stack: ProcessStack) -> None:
    """Have the stack start the executor that dies of one token."""
    program = str(Path(__file__).parents[1] / "poisoned_executor.py")
    plan = stack._plan
    services = tuple(
        dataclasses.replace(each, command=(sys.executable, program, *each.command[3:]))
        if each.name == "executor-0"
        else each
        for each in plan.services
    )
    stack._plan = dataclasses.replace(plan, services=services)


async def _keep_alive(stack: ProcessStack) -> None:
    """Start the executor again whenever it has died, as a supervisor does."""
    while True:
        await asyncio.sleep(0.05)
        if stack.processes["executor-0"].poll() is not None:
            stack.start("executor-0")


async def _first_tokens(call: grpc.aio.UnaryStreamCall) -> list[int]:  # type: ignore[type-arg]
    while not (response := await call.read()).HasField("delta"):
        pass
    return list(response.delta.token_ids)


async def _rest(call: grpc.aio.UnaryStreamCall) -> list[int]:  # type: ignore[type-arg]
    tokens: list[int] = []
    while (response := await call.read()) is not grpc.aio.EOF:
        tokens.extend(response.delta.token_ids)
    return tokens
