"""A cell of real services on this machine, and the same requests sent to it at the same times as on a made-up clock."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from simulation import Job, Outcome

from octavo.bench.grpc_client import message_of
from octavo.bench.records import BenchRequest
from octavo.bench.target import GenerationOptions
from octavo.local.plan import PlanOptions, plan_cell
from octavo.local.probe import wait_until_serving
from octavo.models.prepared import PreparedModel
from octavo.rpc.channel import open_channel
from octavo.v1 import inference_pb2_grpc

_START_SECONDS = 120.0
_FIRST_TOKEN_ID, _LAST_TOKEN_ID = 100, 250
"""Ordinary tokens of any vocabulary."""


async def run_real(model: PreparedModel, jobs: Sequence[Job], flags: Mapping[str, str]) -> tuple[list[Outcome], float]:
    """Start a cell with further flags, send every job at its time, stop; returns the outcomes and the seconds."""
    async with _cell(model, flags) as address, open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        # The first request of a cell pays for what is made once.
        await _send(stub, Job(0.0, 32, 4, "warm-up"), 0, time.monotonic())
        start = time.monotonic()
        async with asyncio.TaskGroup() as group:
            sent = [group.create_task(_send(stub, job, index, start)) for index, job in enumerate(jobs, start=1)]
        return [each.result() for each in sent], time.monotonic() - start


async def _send(stub: Any, job: Job, index: int, start: float) -> Outcome:
    await asyncio.sleep(max(0.0, start + job.at - time.monotonic()))
    chance = random.Random(index)
    ids = [chance.randint(_FIRST_TOKEN_ID, _LAST_TOKEN_ID) for _ in range(job.num_prompt_tokens)]
    request = message_of(BenchRequest(ids, job.max_tokens), GenerationOptions())
    outcome, began = Outcome(job), time.monotonic()
    async for response in stub.Generate(request):
        if not outcome.first_token and response.HasField("delta"):
            outcome.first_token = time.monotonic() - began
    outcome.end = time.monotonic() - began
    return outcome


@contextlib.asynccontextmanager
async def _cell(model: PreparedModel, flags: Mapping[str, str]) -> AsyncIterator[str]:
    """Start one process for each service; yields the gateway's address once it serves, and stops them all."""
    ports = dict.fromkeys(("gateway_port", "scheduler_port", "executor_port", "admin_port", "http_port"), 0)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
    options = PlanOptions(**ports, metrics_port=0, extra={"log_level": "error", **flags})  # type: ignore[arg-type]
    plan = plan_cell(model, options, environ)
    processes: list[asyncio.subprocess.Process] = []
    try:
        for service in plan.services:
            process = await asyncio.create_subprocess_exec(*service.command, env=environ)
            processes.append(process)
        async with asyncio.timeout(_START_SECONDS):
            await wait_until_serving(plan.gateway_address)
        yield plan.gateway_address
    finally:
        for process in processes:
            if process.returncode is None:
                process.terminate()
        for process in processes:
            await process.wait()
