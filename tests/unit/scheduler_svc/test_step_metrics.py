"""The figures of the scheduler's page, number by number, on a clock of the test's own."""

from __future__ import annotations

import asyncio

import pytest
from fakes import FakeExecutor, make_record, make_spec
from metrics_page import Page, page_of
from prometheus_client import CollectorRegistry

from scheduler_svc.batch import BatchResult, ScheduledBatch, StageTimings, StepFailureReason
from scheduler_svc.engine import Engine
from scheduler_svc.engine_loop import EngineLoop
from scheduler_svc.metrics import LiveState, SchedulerMetrics
from scheduler_svc.output_streams import OutputStreams
from scheduler_svc.policies.fcfs import FcfsScheduler
from scheduler_svc.request_record import ChoiceRecord


class Bench:
    """An engine loop and one fake executor, on a clock that stands still unless moved."""

    def __init__(self, **spec: int) -> None:
        self.now = 1000.0
        self.registry = CollectorRegistry()
        self.loop = EngineLoop(
            Engine(FcfsScheduler(), 2),
            OutputStreams(1 << 30),
            SchedulerMetrics(self.registry),
            clock=lambda: self.now,
            expire_interval=1000.0,
        )
        self.registry.register(LiveState(self.loop.load, lambda: 0))
        self.sent: list[ScheduledBatch] = []
        self.session = self.loop.join(make_spec(**spec), self)
        self.executor = FakeExecutor(make_spec(**spec), self.session)
        self._task = asyncio.ensure_future(self.loop.run())

    def send(self, batch: ScheduledBatch) -> None:
        """Take a step, as an executor's link does."""
        self.sent.append(batch)

    async def turn(self) -> None:
        """Let steps be built."""
        for _ in range(6):
            await asyncio.sleep(0)

    async def answer(self, timings: StageTimings | None, failure: StepFailureReason | None = None) -> None:
        """Run the oldest step and answer it with these timings."""
        result = self.executor.run(self.sent.pop(0), failure=failure)
        answer = BatchResult(result.session, result.step, result.columns, result.failure, timings=timings)
        self.loop.apply(self.session, answer)
        await self.turn()

    async def finish(self) -> None:
        """Answer whatever is sent until nothing is, and end."""
        while self.sent:
            await self.answer(None)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    @property
    def page(self) -> Page:
        return page_of(self.registry)


@pytest.mark.asyncio
async def test_waiting_behind_the_step_before_is_no_hop() -> None:
    """Of two steps in flight the second waits in the executor: its hop is its round trip without that wait."""
    bench = Bench()
    bench.loop.submit(make_record(max_tokens=20))
    await bench.turn()
    assert len(bench.sent) == 2
    # Both leave at 0 ms and arrive at 1 ms; each takes 10 ms; results are back 2 ms after their end.
    bench.now += 0.013
    await bench.answer(StageTimings(0.0, 0.001, 0.008, 0.001))
    bench.now += 0.010
    await bench.answer(StageTimings(0.010, 0.001, 0.008, 0.001))
    page = bench.page
    assert page["octavo_step_hop_seconds_count"] == 2
    assert page["octavo_step_hop_seconds_sum"] == pytest.approx(2 * 0.003)
    assert page['octavo_step_hop_seconds_bucket{le="0.002"}'] == 0
    assert page['octavo_step_hop_seconds_bucket{le="0.005"}'] == 2
    assert page['octavo_step_seconds_sum{stage="queue"}'] == pytest.approx(0.010)
    assert page['octavo_step_seconds_sum{stage="forward"}'] == pytest.approx(0.016)
    assert page['octavo_step_seconds_count{stage="idle"}'] == 0
    assert page["octavo_publish_seconds_count"] == 2
    # An executor's clock that runs fast makes no negative time.
    await bench.answer(StageTimings(0.0, 1.0, 1.0, 1.0))
    assert bench.page["octavo_step_hop_seconds_sum"] == pytest.approx(2 * 0.003)
    await bench.finish()


@pytest.mark.asyncio
async def test_a_device_that_waited_is_told_apart() -> None:
    """How long it did nothing is a stage of its own and no part of the hop, which holds that time already."""
    bench = Bench()
    bench.loop.submit(make_record(max_tokens=20))
    await bench.turn()
    bench.now += 0.012
    await bench.answer(StageTimings(0.0, 0.001, 0.008, 0.001, idle=0.004))
    page = bench.page
    assert page['octavo_step_seconds_sum{stage="idle"}'] == pytest.approx(0.004)
    assert page["octavo_step_hop_seconds_sum"] == pytest.approx(0.002)
    await bench.finish()


@pytest.mark.asyncio
async def test_failed_steps_and_mere_releases_have_no_timings() -> None:
    """A step that failed tells nothing of stages; one without rows is no step as far as the page is concerned."""
    bench = Bench()
    bench.loop.submit(make_record(max_tokens=2))
    await bench.turn()
    await bench.answer(None, StepFailureReason.OUT_OF_MEMORY)
    assert bench.page["octavo_step_hop_seconds_count"] == 0
    while bench.sent:
        await bench.answer(StageTimings(0.0, 0.0, 0.0, 0.0))
    page = bench.page
    assert page["octavo_scheduler_requests_live"] == 0
    with_rows = page["octavo_step_rows_count"]
    assert page["octavo_step_tokens_count"] == page["octavo_schedule_seconds_count"] == with_rows
    assert page["octavo_step_hop_seconds_count"] < with_rows < bench.loop.load().executors[0].num_steps
    await bench.finish()


@pytest.mark.asyncio
async def test_the_queue_ends_at_the_first_admission() -> None:
    """A request's wait is counted once, from its acceptance by a gateway: not again for other choices or after a
    preemption, and not at all where it had started before.
    """
    bench = Bench(num_blocks=7, block_size=4, max_num_seqs=2)
    bench.loop.submit(make_record(1, max_tokens=12, age=1.5))
    await bench.turn()
    assert bench.page["octavo_queue_seconds_count"] == 1
    assert bench.page["octavo_queue_seconds_sum"] == pytest.approx(1.5)
    bench.loop.submit(make_record(2, max_tokens=12, choices=[ChoiceRecord()] * 2))
    bench.loop.submit(make_record(3, max_tokens=12, choices=[ChoiceRecord((4, 5))], age=50.0))
    bench.loop.submit(make_record(4, max_tokens=12, was_accepted=True, age=50.0))
    bench.now += 4.0
    await bench.finish()
    page = bench.page
    assert page['octavo_scheduler_requests_ended_total{outcome="finished"}'] == 4
    assert page["octavo_preemptions_total"] > 0
    assert page["octavo_queue_seconds_count"] == 2
    assert page["octavo_queue_seconds_sum"] == pytest.approx(1.5 + 4.0)


@pytest.mark.asyncio
async def test_every_admission_asks_for_its_tokens() -> None:
    """Prefix queries count the tokens of each admission, those after a preemption too, and hits what they found."""
    bench = Bench(num_blocks=7, block_size=4, max_num_seqs=2)
    for counter in (1, 2):
        bench.loop.submit(make_record(counter, max_tokens=14))
    await bench.turn()
    expected = hits = 0
    while bench.sent:
        expected += sum(len(new.token_ids) for new in bench.sent[0].new_sequences)
        hits += sum(new.num_cached_tokens for new in bench.sent[0].new_sequences)
        await bench.answer(None)
    assert bench.page["octavo_preemptions_total"] > 0
    assert bench.page["octavo_prefix_query_tokens_total"] == expected > 6
    assert bench.page["octavo_prefix_hit_tokens_total"] == hits
    await bench.finish()


@pytest.mark.asyncio
async def test_tokens_that_need_no_computing_are_hits() -> None:
    """What an admission takes from the prefix cache is what the figures call a hit."""
    bench = Bench()
    prompt = tuple(range(2 * make_spec().block_size + 1))
    for counter in (1, 2):
        bench.loop.submit(make_record(counter, prompt, max_tokens=1))
        await bench.turn()
        while bench.sent:
            await bench.answer(None)
    assert bench.page["octavo_prefix_query_tokens_total"] == 2 * len(prompt)
    assert bench.page["octavo_prefix_hit_tokens_total"] == len(prompt) - 1
    await bench.finish()


def test_every_series_has_its_name_and_says_what_it_is() -> None:
    """The page holds exactly the documented families, each with a help text that is a sentence."""
    registry = CollectorRegistry()
    SchedulerMetrics(registry)
    registry.register(LiveState(Engine(FcfsScheduler(), 2).load, lambda: 0))
    families = {family.name: family.documentation for family in registry.collect()}
    assert sorted(families) == [
        "octavo_desyncs",
        "octavo_kv_blocks",
        "octavo_kv_reserved_blocks",
        "octavo_policy_failures",
        "octavo_preemptions",
        "octavo_prefix_hit_tokens",
        "octavo_prefix_query_tokens",
        "octavo_publish_seconds",
        "octavo_queue_seconds",
        "octavo_schedule_seconds",
        "octavo_scheduler_executors",
        "octavo_scheduler_gateways",
        "octavo_scheduler_generated_tokens",
        "octavo_scheduler_requests_accepted",
        "octavo_scheduler_requests_ended",
        "octavo_scheduler_requests_live",
        "octavo_scheduler_requests_over_time",
        "octavo_scheduler_requests_rejected",
        "octavo_scheduler_sequences",
        "octavo_step_hop_seconds",
        "octavo_step_rows",
        "octavo_step_seconds",
        "octavo_step_tokens",
    ]
    assert all(text[0].isupper() and text.endswith(".") for text in families.values())
    chosen = registry.restricted_registry(["octavo_scheduler_requests_live", "octavo_step_rows_count"])
    assert {sample.name for family in chosen.collect() for sample in family.samples} == {
        "octavo_scheduler_requests_live",
        "octavo_step_rows_count",
    }
