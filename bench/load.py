"""Sends a workload to a server, Octavo's over gRPC or a peer's over HTTP, with the load generator of `octavo bench`.

Both kinds of server are timed by the same code, and what the generator itself takes of the CPU either is charged with.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

from workloads import Workload

from octavo.bench.figures import Distribution, figures_of
from octavo.bench.grpc_client import GrpcTarget
from octavo.bench.http_client import HttpTarget
from octavo.bench.records import OK, BenchRequest, Record
from octavo.bench.runner import Runner
from octavo.bench.target import GenerationOptions, Target

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
        lengths = (record.prompt_tokens, record.output_tokens)
        wanted = (len(asked.prompt), asked.num_output_tokens)
        if lengths != wanted:
            raise WrongOutputError(
                f"request {record.index} of {workload.name}: {lengths} tokens of input and output, wanted {wanted}"
            )
