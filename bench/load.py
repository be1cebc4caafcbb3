"""Sends a workload to a server, Octavo's over gRPC or a peer's over HTTP, with the load generator of `octavo bench`.

Both kinds of server are timed by the same code, and what the generator itself takes of the CPU either is charged with.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Sequence
from typing import Any

import grpc
from workloads import Request, Workload

from octavo.bench.figures import Distribution, figures_of
from octavo.bench.grpc_client import GrpcTarget, message_of
from octavo.bench.http_client import HttpTarget
from octavo.bench.records import OK, BenchRequest, Record
from octavo.bench.runner import Runner
from octavo.bench.target import GenerationOptions, Target
from octavo.rpc.channel import open_channel
from octavo.v1 import inference_pb2, inference_pb2_grpc

CLOCK = time.perf_counter
OPTIONS = GenerationOptions(timeout=1800.0)
"""Greedy, and ends of sequence are ignored."""


class WrongOutputError(Exception):
    """An engine did not do what it was asked: its times mean nothing."""


def grpc_target(address: str) -> Target:
    """Return Octavo's gateway as a target. Make it on the event loop."""
    return GrpcTarget([address], OPTIONS, CLOCK)


def http_target(url: str) -> Target:
    """Return an OpenAI-compatible server as a target. Make it on the event loop."""
    return HttpTarget(url, OPTIONS, CLOCK)


async def collect(address: str, workload: Workload) -> dict[str, Any]:
    """Ask Octavo's gateway for a workload, all at once, and to answer each request at its end (GenerateOnce).

    Returns the figures of the run, None where only a stream tells. Raises WrongOutputError where any request failed or
    had another length than asked.
    """
    messages = [
        inference_pb2.GenerateOnceRequest(
            request=message_of(BenchRequest(request.prompt, request.num_output_tokens), OPTIONS)
        )
        for request in workload.requests
    ]
    async with open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await channel.channel_ready()
        started = CLOCK()
        try:
            answers = await asyncio.gather(*(stub.GenerateOnce(each, timeout=OPTIONS.timeout) for each in messages))
        except grpc.aio.AioRpcError as error:
            raise WrongOutputError(f"{workload.name}: {error.code().name}: {error.details()}") from None
        seconds = CLOCK() - started
    for index, (answer, request) in enumerate(zip(answers, workload.requests, strict=True)):
        lengths = (answer.started.prompt_tokens, sum(len(choice.token_ids) for choice in answer.choices))
        _check_lengths(workload, index, lengths, request)
    figures = {"total_s": seconds, "output_tokens_per_s": workload.num_output_tokens / seconds}
    return figures | dict.fromkeys(("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "generator_cpu_share"))


async def drive(target: Target, workload: Workload) -> dict[str, Any]:
    """Send a workload, all at once or at their arrivals, and return the figures of the run.

    Raises WrongOutputError where any request failed or had other lengths than asked.
    """
    is_online = any(request.arrival for request in workload.requests)
    requests = [
        BenchRequest(request.prompt, request.num_output_tokens, request.arrival if is_online else None)
        for request in workload.requests
    ]
    runner = Runner(target, CLOCK)
    # What lives by now lives on: the collector need not walk it while times are taken.
    gc.collect()
    gc.freeze()
    try:
        running = runner.run_open(requests) if is_online else runner.run_closed(requests, len(requests))
        result = await running
    finally:
        gc.unfreeze()
    _check(result.records, workload)
    figures = figures_of(result)
    return {
        "total_s": figures.duration,
        "output_tokens_per_s": figures.output_token_rate,
        "ttft_ms": _milliseconds(figures.ttft),
        "tpot_ms": _milliseconds(figures.tpot),
        "itl_ms": _milliseconds(figures.itl),
        "e2e_ms": _milliseconds(figures.e2e),
        "generator_cpu_share": figures.cpu_share,
    }


def _milliseconds(sample: Distribution | None) -> dict[str, float] | None:
    if sample is None:
        return None
    return {"mean": 1e3 * sample.mean, "p50": 1e3 * sample.p50, "p99": 1e3 * sample.p99}


def _check(records: Sequence[Record], workload: Workload) -> None:
    for record in records:
        asked = workload.requests[record.index]
        if record.status != OK:
            raise WrongOutputError(f"request {record.index} of {workload.name}: {record.status}: {record.message}")
        _check_lengths(workload, record.index, (record.prompt_tokens, record.output_tokens), asked)


def _check_lengths(workload: Workload, index: int, lengths: tuple[int | None, int | None], asked: Request) -> None:
    wanted = (len(asked.prompt), asked.num_output_tokens)
    if lengths != wanted:
        raise WrongOutputError(
            f"request {index} of {workload.name}: {lengths} tokens of input and output, wanted {wanted}"
        )
