"""Under a stream of requests that never ends: nobody starves, somebody always moves, and no time limit is forgotten."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from cells import Cell, make_cell
from fakes import make_record, make_spec, undisturbed
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.batch import ExecutorSpec
from scheduler_svc.length_class import length_class
from scheduler_svc.policies import priority, shortest_first
from scheduler_svc.policies.base import BaseScheduler
from scheduler_svc.policies.fcfs import FcfsScheduler
from scheduler_svc.policies.priority import PriorityScheduler
from scheduler_svc.policies.shortest_first import ShortestFirstScheduler
from scheduler_svc.request_record import RequestRecord

SPEC = make_spec(num_blocks=25, block_size=16, max_num_seqs=4, max_num_batched_tokens=48, max_model_len=384)
"""One long prompt fills most of it."""


@dataclass(frozen=True)
class Arrival:
    """A request of the stream."""

    num_prompt_tokens: int
    max_tokens: int
    priority: int

    def record(self, counter: int) -> RequestRecord:
        """The request; its prompt is its own, so nothing of it is cached."""
        prompt = [counter // 50 % 50, counter % 50, *([3] * (self.num_prompt_tokens - 2))]
        return make_record(counter, prompt, max_tokens=self.max_tokens, priority=self.priority, seed=counter)


arrivals = st.builds(
    Arrival,
    num_prompt_tokens=st.integers(2, 20) | st.integers(200, 300),
    max_tokens=st.integers(1, 12),
    priority=st.integers(-1, 2),
)


def overtaking_seconds(policy: BaseScheduler, victim: Arrival, stream: list[Arrival]) -> float:
    """How long after the victim a request may come at most and still go before it: what the policy promises."""
    if isinstance(policy, PriorityScheduler):
        return priority.AGING * max(0, *(each.priority - victim.priority for each in stream))
    if isinstance(policy, ShortestFirstScheduler):
        allowance = shortest_first.ALLOWANCES[length_class(victim.num_prompt_tokens)]
        return allowance - shortest_first.ALLOWANCES[0]
    return 0.0


def rounds_of(arrival: Arrival) -> int:
    """Rounds that a request takes with the executor to itself, recomputed from the start after each token: at most."""
    return (arrival.max_tokens + 1) * (-(-(arrival.num_prompt_tokens + arrival.max_tokens) // 40) + 2)


@pytest.mark.parametrize("policy_class", [FcfsScheduler, PriorityScheduler, ShortestFirstScheduler])
@given(
    victim=arrivals,
    before=st.lists(arrivals, max_size=6),
    stream=st.lists(arrivals, min_size=1, max_size=4),
    per_round=st.integers(1, 2),
    depth=st.integers(1, 2),
)
def test_nothing_starves(
    policy_class: type[BaseScheduler],
    victim: Arrival,
    before: list[Arrival],
    stream: list[Arrival],
    per_round: int,
    depth: int,
) -> None:
    """However many requests come, for ever, each request ends once those have that may go before it."""
    policy = policy_class()
    cell = make_cell(SPEC, depth=depth, policy=policy)
    counter = itertools.count(1)
    for each in before:
        cell.submit(each.record(next(counter)))
    record = victim.record(next(counter))
    cell.submit(record)
    # A round is a second. Who comes within the promise may all go first, and so may those that it finds there.
    num_first = len(before) + per_round * (int(overtaking_seconds(policy, victim, stream)) + 1)
    bound = (num_first + SPEC.max_num_seqs) * max(map(rounds_of, (victim, *before, *stream)))
    source = itertools.cycle(stream)
    for _ in range(bound):
        if record.id in cell.gateway.done:
            break
        # What waits behind it cannot matter any more, so it need not be there.
        if cell.now - 100.0 <= overtaking_seconds(policy, victim, stream) or cell.engine.load().num_waiting < 8:
            for _ in range(per_round):
                cell.submit(next(source).record(next(counter)))
        cell.round()
        cell.now += 1.0
    assert record.id in cell.gateway.done, f"not ended after {bound} rounds: {cell.engine.load()}"
    assert cell.gateway.tokens[record.id, 0] == undisturbed(record, 0, max_model_len=SPEC.max_model_len)[0]


@pytest.mark.parametrize("policy_class", [FcfsScheduler, PriorityScheduler, ShortestFirstScheduler])
@given(
    crowd=st.lists(arrivals, min_size=1, max_size=10),
    per_round=st.integers(1, 4),
    depth=st.integers(1, 3),
)
def test_c3_a_full_pool_always_moves(
    policy_class: type[BaseScheduler], crowd: list[Arrival], per_round: int, depth: int
) -> None:
    """C3: at full occupancy, evictions and all, somebody commits a token or ends every few rounds, until all have."""
    cell = make_cell(SPEC, depth=depth, policy=policy_class())
    records = [each.record(counter) for counter, each in enumerate(crowd, 1)]
    waiting = list(records)
    idle = 0
    # Nothing takes longer than to compute the longest prompt of the crowd, beside as many rows as there are.
    patience = 2 + depth + -(-max(each.num_prompt_tokens + each.max_tokens for each in crowd) // 44)
    while waiting or cell.engine.load().num_requests:
        for record in waiting[:per_round]:
            cell.submit(record)
        del waiting[:per_round]
        before = progress(cell)
        cell.round()
        cell.now += 1.0
        idle = 0 if progress(cell) != before or not cell.engine.load().num_requests else idle + 1
        assert idle <= patience, f"no progress in {idle} rounds: {cell.engine.load()}"
    for record in records:
        assert cell.gateway.tokens[record.id, 0] == undisturbed(record, 0, max_model_len=SPEC.max_model_len)[0]


def progress(cell: Cell) -> tuple[int, int]:
    """Tokens committed, and requests ended."""
    return sum(map(len, cell.gateway.tokens.values())), len(cell.gateway.done)


limits = st.none() | st.floats(0.05, 6.0)


@dataclass(frozen=True)
class Limited:
    """A request with time limits."""

    arrival: Arrival
    deadline: float | None
    queue_ttl: float | None
    first_token: float | None


@pytest.mark.parametrize("policy_class", [FcfsScheduler, PriorityScheduler, ShortestFirstScheduler])
@given(
    crowd=st.lists(st.builds(Limited, arrivals, limits, limits, limits), min_size=1, max_size=12),
    step_seconds=st.sampled_from((0.02, 0.1, 0.5)),
    depth=st.integers(1, 2),
)
def test_limits_hold_and_what_is_foretold_has_not_run(
    policy_class: type[BaseScheduler], crowd: list[Limited], step_seconds: float, depth: int
) -> None:
    """No request outlives its limits by more than a round; none ends by one that it had met; and what ends by a
    prediction was never sent to an executor, nor was what ended by its queue TTL.
    """
    cell = make_cell(spec_with_room(), depth=depth, policy=policy_class())
    crowd_of = {}
    submitted_at = {}
    first_token_at: dict[object, float] = {}
    for counter, each in enumerate(crowd, 1):
        record = each.arrival.record(counter)
        record = make_record(
            counter,
            record.prompt_token_ids,
            max_tokens=each.arrival.max_tokens,
            priority=each.arrival.priority,
            remaining_deadline=each.deadline,
            remaining_queue_ttl=each.queue_ttl,
            remaining_first_token=each.first_token,
        )
        crowd_of[record.id] = each
        submitted_at[record.id] = cell.now
        cell.submit(record)
        go_on(cell, step_seconds, first_token_at)
        check_limits(cell, crowd_of, submitted_at, first_token_at, step_seconds)
    while cell.engine.load().num_requests:
        go_on(cell, step_seconds, first_token_at)
        check_limits(cell, crowd_of, submitted_at, first_token_at, step_seconds)
    sent = {new.request for batch in cell.batches for new in batch.new_sequences}
    for request, done in cell.gateway.done.items():
        if done.error is None:
            continue
        reason, metadata = done.error.reason, done.error.metadata
        assert reason in ("DEADLINE", "QUEUE_TTL", "FIRST_TOKEN_TARGET")
        limit = getattr(crowd_of[request], reason.removesuffix("_TARGET").lower())
        assert limit is not None
        assert float(metadata["limit_seconds"]) == pytest.approx(limit, abs=0.002)
        if metadata["predicted"] == "true" or reason == "QUEUE_TTL":
            assert request not in sent
        if metadata["predicted"] == "false":
            assert float(metadata["age_seconds"]) >= limit - 0.002
        if reason == "FIRST_TOKEN_TARGET":
            assert request not in first_token_at


def spec_with_room() -> ExecutorSpec:
    """Few rows, so that some wait."""
    return make_spec(num_blocks=60, max_num_seqs=2, max_num_batched_tokens=48, max_model_len=384)


def go_on(cell: Cell, step_seconds: float, first_token_at: dict[object, float]) -> None:
    """One round in which the steps take their time, and the limits are looked at, as the engine's loop does."""
    cell.expire()
    cell.round()
    cell.now += step_seconds
    for (request, _), tokens in cell.gateway.tokens.items():
        if tokens:
            first_token_at.setdefault(request, cell.now)


def check_limits(
    cell: Cell,
    crowd_of: dict[tuple[str, int], Limited],
    submitted_at: dict[tuple[str, int], float],
    first_token_at: dict[object, float],
    step_seconds: float,
) -> None:
    """Nobody lives past a limit."""
    cell.expire()
    sent = {new.request for batch in cell.batches for new in batch.new_sequences}
    for request, each in crowd_of.items():
        if request in cell.gateway.done:
            continue
        age = cell.now - submitted_at[request]
        assert each.deadline is None or age <= each.deadline + step_seconds
        assert each.queue_ttl is None or request in sent or age <= each.queue_ttl + step_seconds
        assert each.first_token is None or request in first_token_at or age <= each.first_token + step_seconds
