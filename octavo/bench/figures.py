"""From records to figures. Pure.

The definitions are the field's usual ones, those of vLLM's serving benchmark (`vllm bench serve`) and of NVIDIA's guide
to LLM benchmarking (AIPerf, formerly GenAI-Perf) where these agree; where they do not, or are silent, it says so here.
Only requests that succeeded count, except where errors are counted. The scheduled arrival is when an open loop was to
send the request; in a closed loop it is the moment of sending.

time to first token (TTFT)   From the scheduled arrival to the first delivery that holds a token. Events without one (a
    role, Started) do not count, as in AIPerf.
inter-token latency (ITL)    The time between two consecutive deliveries that hold tokens: what a reader waits. One
    sample a delivery, over all requests; a delivery of k tokens is one gap, as in vLLM: neither divided by k, which
    would hide the wait, nor followed by k - 1 gaps of zero, which would hide it in the percentiles. Deliveries of more
    than one token are told by `tokens_per_delivery`. (AIPerf calls this inter-chunk latency; its ITL is TPOT here.)
time per output token (TPOT) Of one request: (last delivery of tokens - first one) / (output tokens - tokens of the
    first delivery). With one token in the first delivery, and so wherever the server does not tell, vLLM's and AIPerf's
    (end - TTFT) / (output tokens - 1). One sample a request that had tokens after the first delivery.
end to end                   From the scheduled arrival to the end of the stream.
duration                     From the moment arrivals count from to the end of the last request.
requests/s, tokens/s         Successful requests, their output tokens, their input and output tokens, over the duration.
goodput                      Successful requests that kept every objective, over the duration (DistServe, OSDI 2024).
    Objectives are upper limits for one request: ttft, tpot, e2e as above; itl holds where every gap of it does.
lag                          From the scheduled arrival to the moment of sending: how far the generator itself was late.
    It is part of TTFT and end to end.
percentiles                  By linear interpolation between the two closest ranks, as numpy.percentile's default.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.bench.records import CANCELLED, OK, Record
from octavo.bench.runner import RunResult

OBJECTIVES = ("ttft", "itl", "tpot", "e2e")
"""What an objective can limit."""


@dataclass(frozen=True)
class Distribution:
    """A sample of times, in seconds."""

    count: int
    mean: float
    min: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True)
class Goodput:
    """How many requests kept every objective."""

    objectives: Mapping[str, float]
    """Limits in seconds, by name."""
    num_good: int
    share: float
    """Of the requests that ended by themselves, failed ones included; 0 where there was none."""
    request_rate: float


@dataclass(frozen=True)
class Figures:
    """The figures of a run; see this module for what each means. Times in seconds; None where there is no sample."""

    duration: float
    num_ok: int
    num_failed: int
    num_cancelled: int
    errors: Mapping[str, int]
    """Failed requests by code, most frequent first."""
    ttft: Distribution | None
    itl: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None
    request_rate: float
    output_token_rate: float
    total_token_rate: float
    prompt_tokens: int
    output_tokens: int
    mean_concurrency: float
    """Requests in flight, averaged over the duration; failed and cancelled ones too."""
    tokens_per_delivery: float
    most_tokens_in_delivery: int
    """0 where the server does not tell."""
    num_short: int
    """Requests that got fewer tokens than they asked for."""
    num_counted_as_deliveries: int
    """Requests whose output tokens are a count of deliveries, for want of the server's own."""
    num_without_prompt_count: int
    """Requests whose input tokens are unknown, and missing in the sums."""
    goodput: Goodput | None
    lag: Distribution | None
    """Of every request that was sent; None in a closed loop."""
    cpu_seconds: float
    cpu_per_token: float
    """CPU time of the generator for each output token, of any request."""
    cpu_share: float
    """CPU time of the generator over the duration: 1 is a whole core."""


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile, 0 to 100, of a sample in rising order that is not empty."""
    if not ordered:
        raise ValueError("no sample")
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def distribution(values: Sequence[float]) -> Distribution | None:
    """Return what is told of a sample; None of an empty one."""
    if not values:
        return None
    ordered = sorted(values)
    p50, p90, p99 = (percentile(ordered, percent) for percent in (50, 90, 99))
    mean = math.fsum(ordered) / len(ordered)
    return Distribution(len(ordered), mean, ordered[0], p50, p90, p99, ordered[-1])


def keeps(record: Record, objectives: Mapping[str, float]) -> bool:
    """Return whether a successful request kept every objective; a figure that it does not have is kept."""
    worst = {
        "ttft": record.ttft,
        "itl": max(record.gaps, default=None),
        "tpot": record.tpot,
        "e2e": record.e2e,
    }
    return all((value := worst[name]) is None or value <= limit for name, limit in objectives.items())


def figures_of(result: RunResult, objectives: Mapping[str, float] | None = None) -> Figures:
    """Return the figures of a run. `objectives` are limits in seconds by a name of OBJECTIVES; None or empty: none."""
    ok = [record for record in result.records if record.status == OK]
    cancelled = [record for record in result.records if record.status == CANCELLED]
    failed = [record for record in result.records if record.status not in (OK, CANCELLED)]
    # A run of which nothing ended has no rates, rather than a division by zero.
    duration = max((record.ended for record in result.records), default=result.origin) - result.origin
    per_second = 1 / duration if duration > 0 else 0.0
    prompt_tokens = sum(record.prompt_tokens or 0 for record in ok)
    output_tokens = sum(record.output_tokens for record in ok)
    num_deliveries = sum(len(record.stamps) for record in ok)
    all_output_tokens = sum(record.output_tokens for record in result.records)
    goodput = None
    if objectives:
        num_good = sum(keeps(record, objectives) for record in ok)
        num_ended = len(ok) + len(failed)
        goodput = Goodput(objectives, num_good, num_good / num_ended if num_ended else 0.0, num_good * per_second)
    is_told = all(sum(record.delta_tokens) == record.output_tokens for record in ok)
    return Figures(
        duration=duration,
        num_ok=len(ok),
        num_failed=len(failed),
        num_cancelled=len(cancelled),
        errors=dict(Counter(record.status for record in failed).most_common()),
        ttft=distribution([record.ttft for record in ok if record.ttft is not None]),
        itl=distribution([gap for record in ok for gap in record.gaps]),
        tpot=distribution([record.tpot for record in ok if record.tpot is not None]),
        e2e=distribution([record.e2e for record in ok]),
        request_rate=len(ok) * per_second,
        output_token_rate=output_tokens * per_second,
        total_token_rate=(prompt_tokens + output_tokens) * per_second,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        mean_concurrency=math.fsum(record.ended - record.sent for record in result.records) * per_second,
        tokens_per_delivery=output_tokens / num_deliveries if num_deliveries else 0.0,
        most_tokens_in_delivery=max((max(each.delta_tokens, default=0) for each in ok), default=0) if is_told else 0,
        num_short=sum(record.output_tokens < record.asked_tokens for record in ok),
        num_counted_as_deliveries=sum(not record.is_counted_by_server for record in ok),
        num_without_prompt_count=sum(record.prompt_tokens is None for record in ok),
        goodput=goodput,
        lag=distribution([record.lag for record in result.records]) if result.is_open_loop else None,
        cpu_seconds=result.cpu_seconds,
        cpu_per_token=result.cpu_seconds / all_output_tokens if all_output_tokens else 0.0,
        cpu_share=result.cpu_seconds * per_second,
    )
