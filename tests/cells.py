"""A whole cell of the scheduler's domain: an engine between fake executors and a fake gateway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fakes import FakeExecutor, FakeGateway, make_spec

from octavo.rpc.errors import ServiceError
from scheduler_svc.batch import BatchResult, Event, ExecutorSpec, RowStatus, ScheduledBatch, StepFailureReason
from scheduler_svc.burst_reserve import ReserveSettings
from scheduler_svc.engine import Engine
from scheduler_svc.policies.base import BaseScheduler
from scheduler_svc.policies.fcfs import FcfsScheduler
from scheduler_svc.queue_bound import QueueBound
from scheduler_svc.request_record import FinishReason, RequestId, RequestRecord
from scheduler_svc.sequence import SequenceStatus
from scheduler_svc.suspects import Loss


class Cell:
    """An engine, fake executors and one fake gateway, driven step by step on a clock of its own.

    Every call checks the invariants. Batches run in order at each executor, only when they are told to.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.gateway = FakeGateway()
        self.executors: dict[int, FakeExecutor] = {}
        self.sent: dict[int, list[ScheduledBatch]] = {}
        self.batches: list[ScheduledBatch] = []
        self.now = 100.0

    def add_executor(self, spec: ExecutorSpec | None = None) -> int:
        """Open a session."""
        spec = spec or make_spec()
        session = self.engine.add_executor(spec)
        self.executors[session] = FakeExecutor(spec, session)
        self.sent[session] = []
        self.check_invariants()
        return session

    def remove_executor(self, session: int, loss: Loss = Loss.LEFT) -> None:
        """Lose a session with all its memory and steps in flight."""
        del self.executors[session], self.sent[session]
        self.receive(self.engine.remove_executor(session, loss))

    def submit(self, record: RequestRecord) -> None:
        """Submit a request of the gateway."""
        events = self.engine.submit(record, self.now)
        self.gateway.accept(record)
        self.receive(events)

    def cancel(
        self,
        request: RequestId,
        choice: int | None = None,
        kept_tokens: int | None = None,
        reason: FinishReason = FinishReason.CANCELLED,
    ) -> None:
        """Cancel a request or a choice."""
        if choice is not None and kept_tokens is not None:
            self.gateway.keep(request, choice, kept_tokens)
        self.receive(self.engine.cancel(request, choice, kept_tokens, reason))

    def abort(self, request: RequestId, error: ServiceError) -> None:
        """End a request with an error, as an operator does."""
        self.receive(self.engine.abort(request, error))

    def expire(self, seconds: float = 0.0) -> None:
        """Let time pass."""
        self.now += seconds
        self.receive(self.engine.expire(self.now))

    def schedule(self, session: int = 1) -> ScheduledBatch | None:
        """Have one step built and sent."""
        batch = self.engine.schedule(session, self.now)
        if batch is not None:
            self.sent[session].append(batch)
            self.batches.append(batch)
        self.check_invariants()
        return batch

    def run(
        self,
        session: int = 1,
        *,
        failure: StepFailureReason | None = None,
        row_statuses: Mapping[int, RowStatus] | None = None,
    ) -> BatchResult:
        """Run the oldest step that was sent and deliver its result."""
        batch = self.sent[session].pop(0)
        result = self.executors[session].run(batch, failure=failure, row_statuses=row_statuses)
        self.deliver(session, result)
        return result

    def deliver(self, session: int, result: BatchResult) -> None:
        """Deliver a result, in order or not, to a live session or not."""
        self.receive(self.engine.update(session, result, self.now))

    def receive(self, events: Sequence[Event]) -> None:
        """Take events, with every invariant checked."""
        self.gateway.receive(events)
        self.check_invariants()

    def check_invariants(self) -> None:
        """Those of the engine, and the order of prefixes across the hops.

        What the gateway has of an open choice is a prefix of what the scheduler has, and that of what the executor
        has in the stay that runs.
        """
        self.engine.check_invariants()
        for sequence in self.engine.live_sequences():
            committed = list(sequence.token_ids)
            at_gateway = self.gateway.tokens[sequence.request_id, sequence.choice]
            assert sequence.output_token_ids[: len(at_gateway)] == at_gateway, f"{sequence}: gateway ahead or apart"
            executor = self.executors.get(sequence.session)
            if executor is not None and sequence.status is SequenceStatus.RUNNING and not sequence.is_discarding:
                at_executor = executor.token_ids(sequence.handle)
                if at_executor is not None:
                    assert at_executor[: len(committed)] == committed, f"{sequence}: executor behind or apart"

    def round(self) -> bool:
        """Build every step that can be built, run one at each executor. Returns whether there was any."""
        is_busy = False
        for session in list(self.executors):
            while self.schedule(session) is not None:
                is_busy = True
        for session in list(self.executors):
            if self.sent[session]:
                self.run(session)
                is_busy = True
        return is_busy

    def settle(self, max_rounds: int = 2000) -> int:
        """Go on undisturbed until nothing is to do; returns the rounds taken, of which there may be max_rounds."""
        for round_number in range(max_rounds):
            if not self.round():
                self.expire()
                return round_number
        raise AssertionError(f"still at work after {max_rounds} rounds: {self.engine.load()}")


def make_cell(
    *specs: ExecutorSpec,
    depth: int = 2,
    policy: BaseScheduler | None = None,
    reserve: ReserveSettings | None = None,
    queue_bound: QueueBound | None = None,
    placement: str = "cache-aware",
) -> Cell:
    """Return a cell with these executors, sessions 1, 2, ..., under FCFS."""
    engine = Engine(
        policy or FcfsScheduler(),
        depth,
        orphan_timeout=30.0,
        reserve=reserve,
        queue_bound=queue_bound,
        placement=placement,
    )
    cell = Cell(engine)
    for spec in specs:
        cell.add_executor(spec)
    return cell
