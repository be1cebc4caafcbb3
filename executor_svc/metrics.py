"""The executor's figures for Prometheus: its steps by stage and outcome, and what it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from executor_svc.batch import RowStatus, StepBatch, StepFailureReason, StepResult
from octavo.rpc.metrics import TOKEN_SECONDS, DistributionFamily

STAGES = ("queue", "prepare", "forward", "sample", "ahead")
OUTCOMES = ("ok", *(reason.name.lower() for reason in StepFailureReason))
STEP_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
GAP_SECONDS = (
    *(0.00001, 0.00002, 0.00003, 0.00004, 0.00005, 0.00006, 0.00008, 0.0001, 0.00012, 0.00015, 0.0002, 0.00025, 0.0003),
    *(0.0004, 0.0005, 0.0007, 0.001, 0.002, 0.005, 0.01, 0.1, 1.0),
)
"""A device that never waits goes from one step to the next in tens of microseconds."""


class ExecutorMetrics:
    """What is observed as it happens. Called on the event loop only.

    Steps that failed are counted by their outcome alone: they have no rows and no stages.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        steps = Counter(
            "octavo_executor_steps",
            "Steps answered: ok, or failed whole for want of memory, by a fault, or refused behind one that failed.",
            ["outcome"],
            registry=registry,
        )
        rows = Counter(
            "octavo_executor_rows",
            "Rows of steps by what became of them, as in the contract.",
            ["status"],
            registry=registry,
        )
        self._tokens = Counter(
            "octavo_executor_tokens", "Tokens computed, prompt and output, recomputed ones too.", registry=registry
        )
        seconds = DistributionFamily(
            "octavo_executor_step_seconds",
            "Where a step's time went: queue (arrival to start, behind the step before it), prepare, forward, sample; "
            "and ahead (inputs built while the step before computed).",
            TOKEN_SECONDS,
            label="stage",
            values=STAGES,
        )
        gap = DistributionFamily(
            "octavo_executor_step_gap_seconds",
            "From the end of a step to the start of the next, where that goes on with a sequence that was there.",
            GAP_SECONDS,
        )
        step_rows = DistributionFamily("octavo_executor_step_rows", "Sequences in a step.", STEP_ROWS)
        for family in (seconds, gap, step_rows):
            registry.register(family)
        # Every series is on the page from the start, and none is looked up in a step.
        self._steps = {outcome: steps.labels(outcome) for outcome in OUTCOMES}
        self._rows = {status: rows.labels(status.name.lower()) for status in RowStatus}
        self._queue, self._prepare, self._forward, self._sample, self._ahead = map(seconds.member, STAGES)
        self._gap, self._step_rows = gap.member(), step_rows.member()

    def step_answered(self, batch: StepBatch, result: StepResult) -> None:
        """Count a step that has come back from the device thread, whether or not anybody still wants to hear it."""
        if result.failure is not None:
            self._steps[result.failure.reason.name.lower()].inc()
            return
        self._steps["ok"].inc()
        if not result.statuses:
            return
        self._step_rows.observe(len(result.statuses))
        timings = result.timings
        self._queue.observe(timings.queue)
        self._prepare.observe(timings.prepare)
        self._forward.observe(timings.forward)
        self._sample.observe(timings.sample)
        if timings.ahead is not None:
            self._ahead.observe(timings.ahead)
        if timings.idle is not None:
            self._gap.observe(timings.idle)
        # Mostly all rows are well; to look at each would cost more than all the rest of this.
        if result.statuses.count(RowStatus.OK) == len(result.statuses):
            self._rows[RowStatus.OK].inc(len(result.statuses))
            self._tokens.inc(sum(batch.num_scheduled_tokens))
            return
        for status, num_tokens in zip(result.statuses, batch.num_scheduled_tokens, strict=True):
            self._rows[status].inc()
            self._tokens.inc(num_tokens if status is RowStatus.OK else 0)


@dataclass(frozen=True)
class Holdings:
    """What a loaded executor holds: bytes of weights as the model has them, seconds that loading them and warming up
    took, KV blocks without the null block, and the bytes of all.
    """

    weights_bytes: int
    load_seconds: float
    kv_blocks: int
    kv_bytes: int


class OpSeconds(Collector):
    """The time of each op, read when a page is made; nothing where ops are not timed."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self._seconds = seconds

    def collect(self) -> Iterable[Metric]:
        """Yield the counters."""
        family = CounterMetricFamily(
            "octavo_executor_op_seconds", "Time in the ops of each class; only with --profile-ops.", labels=["op"]
        )
        for op, seconds in self._seconds.items():
            family.add_metric([op], seconds)
        yield family


class LiveState(Collector):
    """What is read when a page is made. has_session: whether a scheduler's session is open.

    While the model loads there is no more than that.
    """

    def __init__(self, has_session: Callable[[], bool]) -> None:
        self._has_session = has_session
        self.holdings: Holdings | None = None

    def describe(self) -> Iterable[Metric]:
        """Yield every family, for its name."""
        return [_session(False), *_held(Holdings(0, 0.0, 0, 0))]

    def collect(self) -> Iterable[Metric]:
        """Yield every family that has a value."""
        yield _session(self._has_session())
        if self.holdings is not None:
            yield from _held(self.holdings)


def _session(is_open: bool) -> Metric:
    return GaugeMetricFamily("octavo_executor_session", "1 while a scheduler's session is open, else 0.", value=is_open)


def _held(holdings: Holdings) -> Iterable[Metric]:
    gauges = (
        (
            "weights_bytes",
            "Weights as the model has them; a kernel's own layout may hold some twice.",
            holdings.weights_bytes,
        ),
        ("model_load_seconds", "Time to load the model and warm up.", holdings.load_seconds),
        ("kv_blocks", "KV blocks that sequences can have.", holdings.kv_blocks),
        ("kv_bytes", "Memory set aside for KV blocks.", holdings.kv_bytes),
    )
    for name, documentation, value in gauges:
        yield GaugeMetricFamily(f"octavo_executor_{name}", documentation, value=value)
