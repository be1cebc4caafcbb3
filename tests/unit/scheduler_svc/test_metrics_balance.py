"""Accepted = ended + live on every page, and every ending counted once, whatever happens."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence

import grpc
import pytest
from fakes import FakeExecutor, make_record, make_spec
from metrics_page import Page, page_of
from prometheus_client import CollectorRegistry

from octavo.rpc.errors import FieldViolation, ServiceError, invalid_argument
from scheduler_svc.batch import (
    BatchResult,
    Event,
    RequestDone,
    RowStatus,
    ScheduledBatch,
    StepFailureReason,
    StepTokens,
    TokensOut,
)
from scheduler_svc.engine import Engine
from scheduler_svc.engine_loop import EngineLoop
from scheduler_svc.gateways import Attachment, Gateways
from scheduler_svc.metrics import LiveState, SchedulerMetrics
from scheduler_svc.output_streams import OutputStreams
from scheduler_svc.policies.fcfs import FcfsScheduler
from scheduler_svc.request_record import ChoiceRecord, RequestId

OUTCOMES = ("finished", "failed", "cancelled")


class Session:
    """A fake executor in session, with the steps that it has been sent."""

    def __init__(self) -> None:
        self.steps: list[ScheduledBatch] = []

    def send(self, batch: ScheduledBatch) -> None:
        self.steps.append(batch)


class Traffic:
    """A scheduler between fake executors and gateways that come and go, driven by chance. Keeps books of its own."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.now = 100.0
        self.registry = CollectorRegistry()
        metrics = SchedulerMetrics(self.registry)
        self.outputs = OutputStreams(1 << 30)
        engine = Engine(FcfsScheduler(), 2, orphan_timeout=5.0)
        self.loop = EngineLoop(
            engine, self, metrics, check_invariants=True, clock=lambda: self.now, expire_interval=1000.0
        )
        self.gateways = Gateways(self.loop, self.outputs, metrics, grace=0.0)
        self.registry.register(LiveState(self.loop.load, self.gateways.__len__))
        self.attached: dict[str, Attachment] = {}
        self.sessions: dict[int, tuple[Session, FakeExecutor]] = {}
        self.num_submitted = 0
        self.accepted: set[RequestId] = set()
        self.rejected: Counter[str] = Counter()
        self.outcomes: dict[RequestId, str] = {}
        self.num_tokens = 0
        self.seen: Counter[str] = Counter()

    # The books.

    def publish(self, events: Sequence[Event]) -> None:
        """Note what the gateways are told, and pass it on."""
        for event in events:
            if isinstance(event, (TokensOut, StepTokens)):
                self.num_tokens += len(event.token_ids)
            else:
                self._note_end(event)
        self.outputs.publish(events)

    def _note_end(self, done: RequestDone) -> None:
        assert done.request not in self.outcomes, "ended twice"
        if done.error is None:
            self.outcomes[done.request] = "finished"
        else:
            self.outcomes[done.request] = "cancelled" if done.error.code is grpc.StatusCode.CANCELLED else "failed"
            self.seen[done.error.reason] += 1

    @property
    def live(self) -> list[RequestId]:
        return sorted(self.accepted - set(self.outcomes))

    # What happens.

    def attach(self) -> None:
        incarnation = f"gateway-{self.draw.randrange(3)}"
        live = [counter for name, counter in self.live if name == incarnation and self.draw.random() < 0.8]
        forgotten = [each for each in self.live if each[0] == incarnation and each[1] not in live]
        self.attached[incarnation] = self.gateways.attach(incarnation, live, 1)
        self._end_silently(forgotten)

    def lose_gateway(self) -> None:
        _, attachment = self.attached.popitem()
        self.gateways.detach(attachment)

    def end_grace(self) -> None:
        """What lost gateways had live has been cancelled by now, and nobody was told."""
        self._end_silently([each for each in self.live if each[0] not in self.attached])

    def _end_silently(self, requests: list[RequestId]) -> None:
        self.outcomes |= dict.fromkeys(requests, "cancelled")

    def submit(self) -> None:
        incarnation, attachment = self.draw.choice(list(self.attached.items()))
        self.num_submitted += 1
        record = make_record(
            self.num_submitted,
            range(1, self.draw.choice((2, 4, 9, 30, 30, 200))),
            incarnation=incarnation,
            model=self.draw.choice(("fake", "fake", "fake", "fake", "unheard-of")),
            max_tokens=self.draw.randrange(1, 20),
            choices=[ChoiceRecord()] * self.draw.choice((1, 1, 3)),
            remaining_deadline=self.draw.choice((None, None, 1.0)),
            was_accepted=self.draw.random() < 0.1,
        )
        before = self.loop.load().num_accepted
        self.gateways.submit(attachment, record)
        if self.loop.load().num_accepted > before:
            self.accepted.add(record.id)
        else:
            assert record.id not in self.accepted
            self.rejected["refused"] += 1

    def submit_nonsense(self) -> None:
        """A Submit that the servicer finds malformed."""
        attachment = self.draw.choice(list(self.attached.values()))
        self.num_submitted += 1
        self.gateways.reject(attachment, self.num_submitted, invalid_argument([FieldViolation("model", "must be set")]))
        self.rejected["malformed"] += 1

    def cancel(self) -> None:
        incarnation, counter = self.draw.choice(self.live)
        attachment = self.attached.get(incarnation)
        if attachment is None:
            return
        choice = self.draw.choice((None, 0, 1))
        self.gateways.cancel(attachment, counter, choice, None, "client")
        if choice is None:
            assert self.outcomes[incarnation, counter] == "finished"  # so it looks to the gateway: without an error
            self.outcomes[incarnation, counter] = "cancelled"
            self.gateways.cancel(attachment, counter, None, None, "client")

    def cancel_by_operator(self) -> None:
        request = self.draw.choice(sorted(self.accepted))
        if request in self.live:
            self.gateways.cancel_for_operator(*request)
            assert request not in self.live
        else:
            with pytest.raises(ServiceError, match="is live"):
                self.gateways.cancel_for_operator(*request)

    def join(self) -> None:
        spec = make_spec(
            num_blocks=12, block_size=4, max_num_seqs=4, max_model_len=100, address=f"executor-{self.num_submitted}"
        )
        if spec.address in [executor.spec.address for _, executor in self.sessions.values()]:
            return
        session = Session()
        number = self.loop.join(spec, session)
        self.sessions[number] = (session, FakeExecutor(spec, number))

    def lose_executor(self) -> None:
        number = self.draw.choice(list(self.sessions))
        del self.sessions[number]
        self.loop.leave(number)

    def run_step(self) -> None:
        number = self.draw.choice(list(self.sessions))
        session, executor = self.sessions[number]
        if not session.steps:
            return
        batch = session.steps.pop(0)
        failure, statuses = None, {}
        chance = self.draw.random()
        if chance < 0.05:
            failure = StepFailureReason.OUT_OF_MEMORY
        elif chance < 0.15 and batch.rows:
            statuses = {batch.rows[0].handle: self.draw.choice((RowStatus.NAN, RowStatus.DESYNC))}
        result = executor.run(batch, failure=failure, row_statuses=statuses)
        self.loop.apply(number, result)
        if chance > 0.9:
            self.loop.apply(number, BatchResult(number, batch.step, result.columns))  # it comes a second time

    def let_time_pass(self) -> None:
        self.now += self.draw.choice((0.5, 1.0, 2.0))

    def choose(self) -> Callable[[], None]:
        """Draw what happens next, among what can."""
        events = [*[self.attach] * 2, *[self.let_time_pass] * 2]
        if len(self.sessions) < 3:
            events.append(self.join)
        if self.sessions:
            events += [self.lose_executor, *[self.run_step] * 60]
        if self.attached:
            events += [self.lose_gateway, self.submit_nonsense, *[self.submit] * 16]
        if self.accepted:
            events += [self.cancel_by_operator] * 4
        if self.live:
            events += [self.cancel] * 4
        return self.draw.choice(events)

    # What the page must say.

    def check(self, page: Page) -> None:
        """Compare a page with the books."""
        ended = {outcome: page[f'octavo_scheduler_requests_ended_total{{outcome="{outcome}"}}'] for outcome in OUTCOMES}
        live = page["octavo_scheduler_requests_live"]
        assert page["octavo_scheduler_requests_accepted_total"] == sum(ended.values()) + live == len(self.accepted)
        assert live == len(self.live)
        counted = Counter(self.outcomes.values())
        assert ended == {outcome: counted[outcome] for outcome in OUTCOMES}
        rejected = sum(value for name, value in page.items() if "requests_rejected_total" in name)
        assert rejected == self.rejected.total() == self.num_submitted - len(self.accepted)
        assert page["octavo_scheduler_generated_tokens_total"] == self.num_tokens
        assert page["octavo_scheduler_gateways"] == len(self.attached)
        assert page["octavo_scheduler_executors"] == len(self.sessions)
        blocks = {name: value for name, value in page.items() if name.startswith("octavo_kv_blocks")}
        assert len(blocks) == 4 * len(self.sessions)
        for _, executor in self.sessions.values():
            name = f'octavo_kv_blocks{{executor="{executor.spec.address}",state='
            parts = [blocks[f'{name}"{state}"}}'] for state in ("free", "owned", "cached", "pinned")]
            assert sum(parts) == 11
        if not self.live:
            assert page['octavo_scheduler_sequences{state="waiting"}'] == 0
            assert page['octavo_scheduler_sequences{state="running"}'] == 0
            assert all(value == 0 for name, value in blocks.items() if '"owned"' in name)


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(2))
async def test_the_books_balance_on_every_page_of_random_traffic(seed: int) -> None:
    """Submits, refusals, cancels of all kinds, deadlines, bad rows, failed steps, lost executors and gateways:
    after each of them the page agrees with books that are kept apart, and when all has ended the gauges are zero.
    """
    traffic = Traffic(seed)
    loop = asyncio.ensure_future(traffic.loop.run())

    async def settle() -> None:
        for _ in range(6):
            await asyncio.sleep(0)

    for _ in range(700):
        traffic.choose()()
        traffic.check(page_of(traffic.registry))
        await settle()
        traffic.end_grace()
        traffic.check(page_of(traffic.registry))
    page = page_of(traffic.registry)
    for outcome in OUTCOMES:
        assert page[f'octavo_scheduler_requests_ended_total{{outcome="{outcome}"}}'] > 5
    assert page["octavo_preemptions_total"] > 0
    assert traffic.rejected["refused"] > 0
    assert {"CANCELLED_BY_OPERATOR", "DEADLINE", "NAN_LOGITS"} <= set(traffic.seen)
    for request in traffic.live:
        traffic.gateways.cancel_for_operator(*request)
    traffic.check(page_of(traffic.registry))
    assert page_of(traffic.registry)["octavo_scheduler_requests_live"] == 0
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
