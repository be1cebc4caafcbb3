"""The scheduler's figures for Prometheus.

What the engine counts is read when a page is made, from one snapshot, so that accepted = ended + live on every page.
What has to be observed as it happens is observed once for each step or request, never for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import grpc
from prometheus_client import CollectorRegistry, Counter, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from octavo.rpc.metrics import HOP_SECONDS, REQUEST_SECONDS, TOKEN_SECONDS, Distribution, DistributionFamily
from scheduler_svc.batch import ScheduledBatch, StageTimings
from scheduler_svc.load import LoadSnapshot

Distributions = Callable[..., Distribution]
"""Gives the distribution of a value of the label, or the only one."""

STAGES = StageTimings._fields
STEP_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
STEP_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STAGE_SECONDS = tuple(sorted({*HOP_SECONDS, *TOKEN_SECONDS}))
"""The forward pass takes as long as a token, the other stages as little as a hop."""
SCHEDULE_SECONDS = (0.00002, 0.00005, *HOP_SECONDS)
"""A small step is built in less than the shortest hop."""

_REFUSALS = (
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
)
"""Codes that a request may be rejected with; each is on the page from the start."""


class SchedulerMetrics:
    """What is observed as it happens. Steps that compute nothing, and in their timings steps that failed, are left out.

    Called on the event loop only.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._rejected = Counter(
            "octavo_scheduler_requests_rejected",
            "Requests that were not accepted, by gRPC status code.",
            ["code"],
            registry=registry,
        )
        for code in _REFUSALS:
            self._rejected.labels(code.name)

        def family(name: str, documentation: str, bounds: Iterable[float], stages: Iterable[str] = ()) -> Distributions:
            made = DistributionFamily(
                f"octavo_{name}", documentation, tuple(bounds), label="stage" if stages else "", values=stages
            )
            registry.register(made)
            return made.member

        self._queue = family(
            "queue_seconds",
            "From a gateway's acceptance of a request to the first admission of one of its sequences to an executor.",
            REQUEST_SECONDS,
        )()
        self._schedule = family("schedule_seconds", "Time to build one step.", SCHEDULE_SECONDS)()
        self._rows = family("step_rows", "Sequences in a step.", STEP_ROWS)()
        self._tokens = family("step_tokens", "Tokens computed by a step, all rows together.", STEP_TOKENS)()
        stage = family(
            "step_seconds",
            "Where a step's time went in the executor: queue (arrival to start, behind the step before it), prepare, "
            "forward, sample; idle, how long the device had waited for it; and ahead (inputs built while the step "
            "before computed).",
            STAGE_SECONDS,
            STAGES,
        )
        self._stages = tuple(map(stage, STAGES))
        self._hop = family(
            "step_hop_seconds",
            "A step's round trip without the time in the executor: both ways through gRPC and both event loops.",
            HOP_SECONDS,
        )()
        self._publish = family(
            "publish_seconds",
            "Time to take one step's result in and hand what it brought to the gateways' streams.",
            SCHEDULE_SECONDS,
        )()

    def rejected(self, code: grpc.StatusCode) -> None:
        """Count a request that was not accepted."""
        self._rejected.labels(code.name).inc()

    def step_built(self, batch: ScheduledBatch, seconds: float) -> None:
        """Count a step that goes out; `seconds` is what it took to build it."""
        if not batch.num_rows:
            return
        self._schedule.observe(seconds)
        self._rows.observe(batch.num_rows)
        self._tokens.observe(batch.num_tokens)
        for new in batch.new_sequences:
            if new.queue_seconds is not None:
                self._queue.observe(new.queue_seconds)

    def step_answered(
        self, batch: ScheduledBatch, timings: StageTimings | None, round_trip: float, publish: float
    ) -> None:
        """Count where the time of a step went: `round_trip` seconds from its sending to its result, `publish` for that.

        With several steps in flight a step waits behind the one before it. It does so in the executor, whose queue
        time holds that wait, so what is left is the way there and back.
        """
        if timings is None or not batch.num_rows:
            return
        for stage, seconds in zip(self._stages, timings, strict=True):
            if seconds is not None:
                stage.observe(seconds)
        # Two clocks may disagree by a little.
        self._hop.observe(max(0.0, round_trip - timings.queue - timings.prepare - timings.forward - timings.sample))
        self._publish.observe(publish)


class LiveState(Collector):
    """What is read when a page is made. load: the engine's; num_gateways: those that are attached."""

    def __init__(self, load: Callable[[], LoadSnapshot], num_gateways: Callable[[], int]) -> None:
        self._load = load
        self._num_gateways = num_gateways

    def describe(self) -> Iterable[Metric]:
        """Yield every family, for its name."""
        return self.collect()

    def collect(self) -> Iterable[Metric]:
        """Yield every family, all of one moment."""
        load = self._load()
        yield from _request_families(load)
        yield from _work_families(load)
        sequences = GaugeMetricFamily(
            "octavo_scheduler_sequences",
            "Choices of live requests that have not ended: waiting for blocks or for an executor, or running.",
            labels=["state"],
        )
        sequences.add_metric(["waiting"], load.num_waiting)
        sequences.add_metric(["running"], load.num_running)
        yield sequences
        blocks = GaugeMetricFamily(
            "octavo_kv_blocks",
            "KV blocks of each executor in session: free, owned by sequences, cached for sequences to come, or pinned "
            "by copies under way.",
            labels=["executor", "state"],
        )
        reserved = GaugeMetricFamily(
            "octavo_kv_reserved_blocks",
            "KV blocks, of those that can be had, that are kept for short newcomers.",
            labels=["executor"],
        )
        for executor in load.executors:
            blocks.add_metric([executor.address, "free"], executor.free_blocks)
            blocks.add_metric([executor.address, "owned"], executor.owned_blocks)
            blocks.add_metric([executor.address, "cached"], executor.cached_blocks)
            blocks.add_metric([executor.address, "pinned"], executor.pinned_blocks)
            reserved.add_metric([executor.address], executor.reserved_blocks)
        yield blocks
        yield reserved
        yield GaugeMetricFamily("octavo_scheduler_executors", "Executors in session.", value=len(load.executors))
        yield GaugeMetricFamily("octavo_scheduler_gateways", "Gateways attached.", value=self._num_gateways())


def _request_families(load: LoadSnapshot) -> Iterable[Metric]:
    yield CounterMetricFamily(
        "octavo_scheduler_requests_accepted",
        "Requests accepted: those that live and those that have ended, at every moment.",
        value=load.num_accepted,
    )
    ended = CounterMetricFamily(
        "octavo_scheduler_requests_ended",
        "Requests that have ended: finished, failed with an error, or cancelled by client, gateway or operator.",
        labels=["outcome"],
    )
    ended.add_metric(["finished"], load.num_finished)
    ended.add_metric(["failed"], load.num_failed)
    ended.add_metric(["cancelled"], load.num_cancelled)
    yield ended
    yield GaugeMetricFamily(
        "octavo_scheduler_requests_live", "Accepted requests that have not ended.", value=load.num_requests
    )


def _work_families(load: LoadSnapshot) -> Iterable[Metric]:
    counters = (
        ("preemptions", "Sequences put back into the queue to be computed again.", load.num_preemptions),
        ("desyncs", "Rows on which scheduler and executor disagreed. Anything but 0 is a fault.", load.num_desyncs),
        ("scheduler_generated_tokens", "Output tokens committed, of all requests.", load.num_generated_tokens),
        (
            "prefix_query_tokens",
            "Tokens of sequences at their admissions, each of which a prefix cache could have held.",
            load.num_prefix_query_tokens,
        ),
        (
            "prefix_hit_tokens",
            "Tokens of sequences at their admissions whose KV was there already.",
            load.num_prefix_hit_tokens,
        ),
    )
    for name, documentation, value in counters:
        yield CounterMetricFamily(f"octavo_{name}", documentation, value=value)
    failures = CounterMetricFamily(
        "octavo_policy_failures",
        "Answers of the policy that were errors or nonsense, by hook. Anything but 0 is a fault of the policy.",
        labels=["hook"],
    )
    for hook, number in load.num_policy_failures.items():
        failures.add_metric([hook], number)
    yield failures
    over_time = CounterMetricFamily(
        "octavo_scheduler_requests_over_time",
        "Requests ended by a time limit: which, and whether it was predicted, before any work on them.",
        labels=["limit", "predicted"],
    )
    for (limit, predicted), number in load.num_over_time.items():
        over_time.add_metric([limit, "true" if predicted else "false"], number)
    yield over_time
