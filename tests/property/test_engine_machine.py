"""The engine with everything that can go wrong around it: its output must be that of the undisturbed model."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import pytest
from cells import Cell
from fakes import make_record, make_spec, undisturbed
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from kv_books import check_kv_state
from shareable import Shareable
from strategies import RequestPlan, executor_specs, request_plans
from whimsical import WhimsicalScheduler

from octavo.rpc.errors import ServiceError
from scheduler_svc.batch import BatchResult, ExecutorSpec, RowStatus, StepFailureReason
from scheduler_svc.burst_reserve import ReserveSettings
from scheduler_svc.engine import Engine
from scheduler_svc.listing import RequestView
from scheduler_svc.load import LoadSnapshot
from scheduler_svc.policies.fcfs import FcfsScheduler
from scheduler_svc.request_record import ChoiceEnd, ChoiceRecord, FinishReason, RequestId, RequestRecord
from scheduler_svc.step_results import MAX_FAILURES
from scheduler_svc.suspects import Loss

# Under the thorough profile this looks for minutes.
pytestmark = pytest.mark.timeout(1800)

NO_LIMIT = 1 << 30


class EngineMachine(RuleBasedStateMachine):
    """Executors run late and out of phase, fail, lose rows, die and come back; clients come, leave and come again."""

    @initialize(
        depth=st.integers(1, 3),
        seed=st.none() | st.integers(0, 1000),
        specs=st.lists(executor_specs, min_size=1, max_size=2),
        share=st.sampled_from((0.0, 0.2, 0.6)),
    )
    def make(self, depth: int, seed: int | None, specs: list[ExecutorSpec], share: float) -> None:
        policy = FcfsScheduler() if seed is None else WhimsicalScheduler(seed)
        self.depth = depth
        # Kept so briefly that it is given back and taken again within a run.
        reserve = ReserveSettings(share, longest_prompt=5, idle_seconds=1.0)
        self.cell = Cell(Engine(policy, depth, orphan_timeout=1000.0, reserve=reserve))
        self.undelivered: dict[int, list[BatchResult]] = {}
        self.delivered: list[tuple[int, BatchResult]] = []
        self.records: dict[RequestId, RequestRecord] = {}
        self.limits: dict[RequestId, int] = {}
        self.deadlines: dict[RequestId, float] = {}
        self.cancelled: set[tuple[RequestId, int]] = set()
        self.ended_by_operator: set[RequestId] = set()
        self.num_cancelled = 0
        self.counters: dict[tuple[int, int], int] = {}
        self.shareable = Shareable()
        self.poisoned: set[int] = set()
        self.num_bad_rows = 0
        self.num_failed_steps = 0
        for spec in specs:
            self.join(spec)

    @precondition(lambda self: len(self.cell.executors) < 3)
    @rule(spec=executor_specs)
    def join(self, spec: ExecutorSpec) -> None:
        self.undelivered[self.cell.add_executor(spec)] = []

    @precondition(lambda self: self.cell.executors)
    @rule(data=st.data(), loss=st.sampled_from((Loss.LEFT, Loss.HUNG, Loss.LOST)))
    def lose_executor(self, data: st.DataObject, loss: Loss) -> None:
        session = self._draw_session(data)
        self.delivered += [(session, result) for result in self.undelivered.pop(session)]
        self.cell.remove_executor(session, loss)

    @rule(plan=request_plans())
    def submit(self, plan: RequestPlan) -> None:
        record, limit = self._make_record(plan, len(self.limits) + 1)
        self.limits[record.id] = limit
        try:
            self.cell.submit(record)
        except ServiceError as error:
            self._check_refusal(record, error)
            return
        self.records[record.id] = record
        if record.remaining_deadline is not None:
            self.deadlines[record.id] = self.cell.now + record.remaining_deadline

    @rule(plans=st.lists(request_plans(), min_size=3, max_size=6))
    def submit_many(self, plans: list[RequestPlan]) -> None:
        for plan in plans:
            self.submit(plan)

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def submit_again(self, data: st.DataObject) -> None:
        record = data.draw(st.sampled_from(list(self.records.values())))
        if record.id not in self.cell.gateway.done:
            self.cell.receive(self.cell.engine.submit(record, self.cell.now))

    @precondition(lambda self: self.records)
    @rule(data=st.data(), kept_tokens=st.none() | st.integers(0, 5))
    def cancel(self, data: st.DataObject, kept_tokens: int | None) -> None:
        record = data.draw(st.sampled_from(list(self.records.values())))
        choice = data.draw(st.none() | st.integers(0, len(record.choices)))
        is_live = record.id not in self.cell.gateway.done
        self.cell.cancel(record.id, choice, kept_tokens)
        self.num_cancelled += is_live and choice is None
        affected = range(len(record.choices)) if choice is None else [choice]
        self.cancelled |= {(record.id, index) for index in affected}
        if record.id not in self.cell.gateway.done:
            assert choice is not None, "a request that is cancelled whole ends at once"

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def cancel_by_operator(self, data: st.DataObject) -> None:
        """Only what is live ends, and at once; what has ended stays as it is."""
        record = data.draw(st.sampled_from(list(self.records.values())))
        earlier = self.cell.gateway.done.get(record.id)
        others = self._live_requests() - {record.id}
        error = ServiceError(grpc.StatusCode.CANCELLED, "CANCELLED_BY_OPERATOR", "by the test")
        self.cell.abort(record.id, error)
        if earlier is None:
            assert self.cell.gateway.done[record.id].error is error, "a live request did not end"
            self.ended_by_operator.add(record.id)
            self.num_cancelled += 1
        else:
            assert self.cell.gateway.done[record.id] is earlier
        assert self._live_requests() == others, "it lives on, or another request ended"

    @rule(page_size=st.integers(1, 4))
    def list_requests(self, page_size: int) -> None:
        """The pages together hold every live request, once, oldest first."""
        views: list[RequestView] = []
        page = self.cell.engine.list_requests(None, page_size, self.cell.now)
        views += page.requests
        while page.next is not None:
            assert len(page.requests) == page_size
            later = self.cell.engine.list_requests(page.next, page_size, self.cell.now)
            assert later.next is None or later.next > page.next, "pages go round in circles"
            views += later.requests
            page = later
        assert sorted(view.id for view in views) == sorted(self._live_requests())
        assert [view.age for view in views] == sorted((view.age for view in views), reverse=True)
        load = self.cell.engine.load()
        assert sum(view.num_waiting for view in views) == load.num_waiting
        assert sum(view.num_running for view in views) == load.num_running
        # A block that choices share is in the table of each.
        assert sum(view.num_blocks for view in views) >= sum(each.owned_blocks for each in load.executors)

    @precondition(lambda self: self.cell.executors)
    @rule(data=st.data())
    def schedule(self, data: st.DataObject) -> None:
        self._schedule(self._draw_session(data))

    @precondition(lambda self: any(self.cell.sent.values()))
    @rule(data=st.data())
    def run_step(self, data: st.DataObject) -> None:
        self._run(self._draw_busy_session(data), None, {})

    @precondition(lambda self: any(self.cell.sent.values()))
    @rule(data=st.data(), reason=st.sampled_from((StepFailureReason.OUT_OF_MEMORY, StepFailureReason.INTERNAL)))
    def run_step_that_fails(self, data: st.DataObject, reason: StepFailureReason) -> None:
        self.num_failed_steps += 1
        self._run(self._draw_busy_session(data), reason, {})

    @precondition(lambda self: any(batch.rows for sent in self.cell.sent.values() for batch in sent[:1]))
    @rule(
        data=st.data(),
        status=st.sampled_from((RowStatus.NAN, RowStatus.BAD_INPUT, RowStatus.DESYNC, RowStatus.SKIPPED)),
    )
    def run_step_with_a_bad_row(self, data: st.DataObject, status: RowStatus) -> None:
        with_rows = [session for session, sent in self.cell.sent.items() if sent and sent[0].rows]
        session = data.draw(st.sampled_from(with_rows))
        handle = data.draw(st.sampled_from([row.handle for row in self.cell.sent[session][0].rows]))
        if status in (RowStatus.NAN, RowStatus.BAD_INPUT):
            self.poisoned.add(self.counters[session, handle])
        else:
            self.num_bad_rows += 1
        self._run(session, None, {handle: status})

    @precondition(lambda self: any(self.undelivered.values()))
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        waiting = [session for session, results in self.undelivered.items() if results]
        session = data.draw(st.sampled_from(waiting))
        self._deliver(session)

    @precondition(lambda self: self.delivered)
    @rule(data=st.data())
    def deliver_again(self, data: st.DataObject) -> None:
        session, result = data.draw(st.sampled_from(self.delivered))
        before = self.cell.engine.load()
        self.cell.deliver(session, result)
        assert self.cell.engine.load() == before, "a result that answers nothing changes nothing"

    @precondition(lambda self: self.cell.executors)
    @rule(rounds=st.integers(1, 8), data=st.data())
    def run_along(self, rounds: int, data: st.DataObject) -> None:
        """Let one session run undisturbed for a while, with as many steps in flight as it may have."""
        session = self._draw_session(data)
        for _ in range(rounds):
            while self._schedule(session):
                pass
            if self.cell.sent[session]:
                self._run(session, None, {})
            if self.undelivered[session]:
                self._deliver(session)

    @rule(page_size=st.integers(1, 4), map_cells=st.integers(1, 60))
    def account_for_blocks(self, page_size: int, map_cells: int) -> None:
        """What GetKvState tells is what the tables of the sequences add up to, at any moment."""
        check_kv_state(self.cell, page_size, map_cells)

    @rule()
    def flush(self) -> None:
        """Nothing that is there now is shared from now on."""
        self.cell.engine.flush_prefix_cache()
        self.cell.check_invariants()
        self.shareable.clear()

    @rule(seconds=st.sampled_from((0.0, 0.5, 2.0)))
    def wait(self, seconds: float) -> None:
        self.cell.expire(seconds)
        overdue = [request for request, deadline in self.deadlines.items() if deadline <= self.cell.now]
        assert all(request in self.cell.gateway.done for request in overdue), "a deadline passed unnoticed"

    def teardown(self) -> None:
        """Let everything end, then account for every token, block, handle and request."""
        if not hasattr(self, "cell"):
            return
        for session, results in self.undelivered.items():
            while results:
                self._deliver(session)
        self._settle()
        # What no executor could take has waited for one that can.
        self.join(make_spec(num_blocks=40, block_size=4, max_model_len=1000, max_num_batched_tokens=7))
        self._settle()
        self.cell.receive(self.cell.engine.expire(self.cell.now))
        for record in self.records.values():
            self._check_outcome(record)
        load = self.cell.engine.load()
        assert load.num_requests == load.num_waiting == load.num_running == 0
        assert load.kv_usage == 0.0
        self._check_counts(load)
        assert load.num_desyncs <= self.num_bad_rows
        for executor in self.cell.executors.values():
            assert not executor.handles, "an executor still holds a sequence"

    def _settle(self) -> None:
        """Go on undisturbed; work is committed at least every so many rounds."""
        budget = min((each.spec.max_num_batched_tokens for each in self.cell.executors.values()), default=1)
        patience = 6 + 2 * self.depth + -(-50 // budget)
        idle_rounds = 0
        while True:
            before = self._progress()
            if not self.cell.round():
                return
            idle_rounds = 0 if self._progress() != before else idle_rounds + 1
            assert idle_rounds <= patience, f"no progress: {self.cell.engine.load()}"

    def _progress(self) -> tuple[int, int]:
        gateway = self.cell.gateway
        return sum(len(tokens) for tokens in gateway.tokens.values()), len(gateway.done)

    def _check_outcome(self, record: RequestRecord) -> None:
        done = self.cell.gateway.done.get(record.id)
        assert done is not None, f"{record.id} never ended"
        if done.error is not None:
            self._check_failure(record, done.error)
        for choice in range(len(record.choices)):
            key = record.id, choice
            expected, expected_end = undisturbed(record, choice, max_model_len=self.limits[record.id])
            tokens = self.cell.gateway.tokens[key]
            end = self.cell.gateway.ends.get(key)
            if end == expected_end:
                assert tokens == expected, f"choice {choice} differs from the undisturbed run"
            else:
                assert tokens == expected[: len(tokens)], f"choice {choice} is no prefix of the undisturbed run"
                if end is None:
                    assert done.error is not None
                else:
                    assert end == ChoiceEnd(FinishReason.CANCELLED)
                    assert key in self.cancelled, f"choice {choice} ended although nobody cancelled it"

    def _check_counts(self, load: LoadSnapshot) -> None:
        """Each request that was accepted is counted under the one way in which it ended."""
        done = self.cell.gateway.done.values()
        num_errors = sum(each.error is not None for each in done)
        assert load.num_accepted == len(self.records) == len(done)
        assert load.num_failed == num_errors - len(self.ended_by_operator)
        assert load.num_cancelled == self.num_cancelled
        assert load.num_finished == load.num_accepted - load.num_failed - load.num_cancelled
        assert all(each.owned_blocks == 0 for each in load.executors)
        num_cached_blocks = sum(each.cached_blocks for each in load.executors)
        assert self.cell.engine.flush_prefix_cache() == num_cached_blocks
        assert all(each.free_blocks == each.total_blocks for each in self.cell.engine.load().executors)

    def _check_failure(self, record: RequestRecord, error: ServiceError) -> None:
        if error.reason in ("NAN_LOGITS", "BAD_INPUT"):
            assert record.id[1] in self.poisoned, "a request failed for another's bad row"
        elif error.reason == "CANCELLED_BY_OPERATOR":
            assert record.id in self.ended_by_operator
        elif error.reason == "DEADLINE":
            assert record.remaining_deadline is not None
        else:
            assert error.reason in ("STEP_FAILED", "STEP_OUT_OF_MEMORY", "DESYNCHRONIZED"), error
            assert self.num_failed_steps + self.num_bad_rows > MAX_FAILURES

    def _check_refusal(self, record: RequestRecord, error: ServiceError) -> None:
        specs = [executor.spec for executor in self.cell.executors.values()]
        if error.code is grpc.StatusCode.UNAVAILABLE:
            assert not specs
            return
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        length = min(len(record.prompt_token_ids) + record.stopping.max_tokens, self.limits[record.id])
        for spec in specs:
            fits_memory = length - 1 <= (spec.num_blocks - 1) * spec.block_size
            fits_model = length <= spec.max_model_len and len(record.prompt_token_ids) < spec.max_model_len
            assert not (fits_memory and fits_model), f"refused although it fits {spec}"

    def _make_record(self, plan: RequestPlan, counter: int) -> tuple[RequestRecord, int]:
        """The record, resumed where the plan says so, and the model length that holds for it."""

        def build(choices: Sequence[ChoiceRecord]) -> RequestRecord:
            return make_record(
                counter,
                plan.prompt(counter),
                seed=plan.seed,
                max_tokens=plan.max_tokens,
                min_tokens=plan.min_tokens,
                stop_token_ids=plan.stop_token_ids,
                choices=choices,
                remaining_deadline=plan.remaining_deadline,
                tenant=plan.tenant,
                cache_salt=plan.cache_salt,
                reads_cache=plan.reads_cache,
                max_cached_tokens=plan.max_cached_tokens,
                writes_cache=plan.writes_cache,
            )

        record = build([ChoiceRecord()] * plan.num_choices)
        limit = max((each.spec.max_model_len for each in self.cell.executors.values()), default=NO_LIMIT)
        if plan.resumed_tokens == 0 or limit <= len(record.prompt_token_ids):
            return record, limit
        choices = []
        for choice in range(plan.num_choices):
            tokens, end = undisturbed(record, choice, max_model_len=limit)
            # Every other choice that is complete was seen to be by the gateway; the scheduler finds out about the rest.
            is_ended = plan.resumed_tokens >= len(tokens) and choice % 2 == 0
            choices.append(ChoiceRecord(tuple(tokens[: plan.resumed_tokens]), end if is_ended else None))
        return build(choices), limit

    def _live_requests(self) -> set[RequestId]:
        return {each.request_id for each in self.cell.engine.live_sequences()}

    def _draw_session(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(list(self.cell.executors)))

    def _draw_busy_session(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from([session for session, sent in self.cell.sent.items() if sent]))

    def _schedule(self, session: int) -> bool:
        """Have a step built, and note whose handles are in it. Returns whether there was one."""
        batch = self.cell.schedule(session)
        if batch is None:
            return False
        for new in batch.new_sequences:
            self.counters[session, new.handle] = new.request[1]
            self.shareable.check_admission(session, new, self.records[new.request])
        return True

    def _run(self, session: int, failure: StepFailureReason | None, row_statuses: dict[int, RowStatus]) -> None:
        """Run the oldest step of a session; its result stays on the way."""
        batch = self.cell.sent[session].pop(0)
        result = self.cell.executors[session].run(batch, failure=failure, row_statuses=row_statuses)
        self.shareable.sent(session, batch)
        self.undelivered[session].append(result)

    def _deliver(self, session: int) -> None:
        result = self.undelivered[session].pop(0)
        self.cell.deliver(session, result)
        self.delivered.append((session, result))
        executor = self.cell.executors[session]
        self.shareable.note(session, executor.spec.block_size, result, self.cell.gateway)


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(stateful_step_count=50)
TestEngine.__doc__ = "Output equals the undisturbed run, every ledger ends empty, every request ends once."
