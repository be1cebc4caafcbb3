"""Executors of two ranks each, as processes: what they serve, and what the loss of a rank costs."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest
from ports import take_port
from reference import Reference
from stack import TIMEOUT, ProcessStack, get_load, plan_processes, processes, wait_idle, wait_serving
from stack_client import read_stream, request_for

from octavo.models.prepared import PreparedModel
from octavo.rpc.channel import open_channel
from octavo.v1 import inference_pb2_grpc

LENGTH = 400
PROMPTS = [[5 + index, 6, 7] for index in range(6)]
FLAGS = {"tensor_parallel": "2", "log_level": "info"}


def _ranks(stack: ProcessStack, name: str) -> list[psutil.Process]:
    """Return an executor's processes, rank 0 first."""
    leader = psutil.Process(stack.processes[name].pid)
    return [leader, *leader.children()]


async def _gone(ranks: list[psutil.Process]) -> None:
    async with asyncio.timeout(TIMEOUT):
        while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in ranks):
            await asyncio.sleep(0.01)


@pytest.mark.full
@pytest.mark.asyncio
@pytest.mark.timeout(300)
@pytest.mark.parametrize("killed", [0, 1])
async def test_a_rank_killed_in_the_middle_fails_nothing(
    tiny_model: PreparedModel, reference: Reference, tmp_path: Path, killed: int
) -> None:
    """Both ranks of its executor end, with the reason in the log of the one that lives on to tell it; requests go on at
    the other executor, token for token. Told to stop, the rest ends in order.
    """
    async with processes(tiny_model, tmp_path, num_executors=2, flags=FLAGS) as stack:
        async with open_channel(stack.gateway_address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            calls = [stub.Generate(request_for(prompt, LENGTH, ignore_eos=True)) for prompt in PROMPTS]
            reading = [asyncio.create_task(read_stream(call)) for call in calls]
            async with asyncio.timeout(TIMEOUT):
                while (await get_load(stack)).num_running < len(PROMPTS):
                    await asyncio.sleep(0.01)
            ranks = _ranks(stack, "executor-0")
            assert len(ranks) == 2
            assert not any(each.done() for each in reading)
            os.kill(ranks[killed].pid, signal.SIGKILL)
            await _gone(ranks)
            async with asyncio.timeout(TIMEOUT):
                outputs = await asyncio.gather(*reading)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            tokens = output.choices[0].token_ids
            assert len(tokens) == LENGTH
            reference.check_greedy(prompt, tokens)
        log = stack.log_of("executor-0")
        assert f"rank {killed} is gone" in log
        others = _ranks(stack, "executor-1")
        await wait_idle(stack)
        codes = stack.stop_all()
        await _gone(others)
        assert codes["executor-1"] == 0
        assert '"level": "critical"' not in stack.log_of("executor-1")


@pytest.mark.full
@pytest.mark.asyncio
@pytest.mark.timeout(300)
async def test_torchrun_starts_ranks_on_two_machines(
    tiny_model: PreparedModel, reference: Reference, tmp_path: Path
) -> None:
    """Two agents start one rank each, which find one another by the agents' store and write what one process does. The
    loss of the one ends the other, and with it both agents.
    """
    stack = plan_processes(tiny_model, tmp_path, flags=FLAGS)
    other = stack.use_torchrun("executor-0", take_port())
    stack.start_all()
    try:
        await wait_serving(stack.gateway_address)
        async with open_channel(stack.gateway_address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            output = await read_stream(stub.Generate(request_for(PROMPTS[0], 40, ignore_eos=True)))
        tokens = output.choices[0].token_ids
        assert len(tokens) == 40
        reference.check_greedy(PROMPTS[0], tokens)
        await wait_idle(stack)
        ranks = [_ranks(stack, name)[1:] for name in ("executor-0", other)]
        assert [len(each) for each in ranks] == [1, 1]
        ranks[1][0].kill()
        await _gone(ranks[0] + ranks[1])
        assert await stack.wait_exit("executor-0") != 0
        assert await stack.wait_exit(other) != 0
        assert "rank 1 is gone" in stack.log_of("executor-0")
    finally:
        stack.stop_all()
