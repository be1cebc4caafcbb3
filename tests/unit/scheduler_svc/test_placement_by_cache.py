"""Sequences go where they should end first: cached prefixes, queues and load weighed by the steps measured."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from cells import Cell, make_cell
from fakes import make_record, make_spec, undisturbed

from scheduler_svc.executor_pool import ExecutorPool
from scheduler_svc.executor_state import ExecutorState
from scheduler_svc.step_rate import LEAST_SLOPE, STEP_TOKENS, StepRate

PREFIX = 128
ROOMY = make_spec(num_blocks=400, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=1000)
OTHER_KIND = replace(make_spec(), fingerprint="other")


def prompt(group: int, tail: int = 0) -> list[int]:
    """Return a prompt of a group's prefix and a tail of its own."""
    rng = random.Random(group)
    return [*(rng.randrange(40) for _ in range(PREFIX)), *((tail * 7 + place) % 40 for place in range(8))]


def sessions_of(cell: Cell) -> list[int]:
    """Return where each live sequence is, by request."""
    return [sequence.session for sequence in sorted(cell.engine.live_sequences(), key=lambda each: each.request_id)]


def where(cell: Cell, counter: int, **fields: object) -> int:
    """Submit a request, tell where it is placed, and let all work end."""
    cell.submit(make_record(counter, **({"max_tokens": 2} | fields)))  # type: ignore[arg-type]
    (session,) = sessions_of(cell)
    cell.settle()
    return session


def test_a_prefix_is_found_again() -> None:
    """Requests of one group go to the executor that has its prefix, wherever other groups go."""
    cell = make_cell(ROOMY, ROOMY, ROOMY)
    homes = {group: where(cell, 1 + group, prompt=prompt(group)) for group in range(6)}
    assert Counter(homes.values()) == {1: 2, 2: 2, 3: 2}, "new groups are spread evenly"
    for counter in range(7, 25):
        assert where(cell, counter, prompt=prompt(counter % 6, counter)) == homes[counter % 6]


def test_a_burst_of_one_group_is_foreseen() -> None:
    """What waits counts as cached to be: requests of a group that come at once are not scattered."""
    cell = make_cell(ROOMY, ROOMY)
    for group in range(2):
        for tail in range(4):
            cell.submit(make_record(1 + 4 * group + tail, prompt=prompt(group, tail), max_tokens=4))
    first, second = sessions_of(cell)[:4], sessions_of(cell)[4:]
    assert len(set(first)) == len(set(second)) == 1
    assert set(first) != set(second)
    cell.settle()
    assert cell.engine.load().num_prefix_hit_tokens == 6 * PREFIX


def test_load_outweighs_a_prefix() -> None:
    """A group that everybody asks for is not served by one executor alone: the others get it too."""
    cell = make_cell(ROOMY, ROOMY)
    for tail in range(32):
        cell.submit(make_record(1 + tail, prompt=prompt(0, tail), max_tokens=60))
    counts = Counter(sessions_of(cell))
    assert min(counts.values()) >= 10, counts
    cell.settle()


def test_salts_and_tenants_share_nothing() -> None:
    """A prefix of another salt or tenant draws nobody, nor does one that is not to be read."""
    cell = make_cell(ROOMY, ROOMY)
    assert where(cell, 1, prompt=prompt(0), cache_salt="a") == 1
    assert where(cell, 2, prompt=prompt(0, 1), cache_salt="b") == 2
    assert where(cell, 3, prompt=prompt(0, 2), cache_salt="a") == 1
    assert where(cell, 4, prompt=prompt(0, 3), cache_salt="a", tenant="other") == 2, "chosen longest ago"
    assert where(cell, 5, prompt=prompt(0, 4), cache_salt="b", reads_cache=False) == 1, "likewise"
    assert where(cell, 6, prompt=prompt(0, 5), cache_salt="b") == 2


def test_what_is_evicted_draws_nobody() -> None:
    """Once its blocks are free, a prefix counts no more."""
    cell = make_cell(ROOMY, ROOMY)
    assert where(cell, 1, prompt=prompt(0)) == 1
    cell.engine.flush_prefix_cache(1)
    assert where(cell, 2, prompt=prompt(0, 1)) == 2


@pytest.mark.parametrize("policy", ["cache-aware", "least-loaded", "round-robin"])
def test_equals_take_turns(policy: str) -> None:
    """Requests without anything in common, one after the other, go round the executors."""
    cell = make_cell(ROOMY, ROOMY, ROOMY, placement=policy)
    homes = [where(cell, 1 + group, prompt=prompt(group)) for group in range(9)]
    assert homes == [1, 2, 3] * 3


def test_round_robin_looks_at_nothing() -> None:
    """Each gets its turn, however full it is."""
    cell = make_cell(ROOMY, ROOMY, placement="round-robin")
    for counter in range(1, 9):
        cell.submit(make_record(counter, prompt=prompt(0) if counter % 2 else [1]))
    assert sessions_of(cell) == [1, 2] * 4


def test_a_slow_executor_gets_less() -> None:
    """Executors of another fingerprint have rates of their own: what one takes longer for is known of it."""
    pool = ExecutorPool("fake", "r1")
    fast, slow = ExecutorState(1, make_spec()), ExecutorState(2, OTHER_KIND)
    pool.add(fast)
    pool.add(slow)
    for num_tokens in (10, 20, 30) * 10:
        fast.step_rate.answered(num_tokens, 0.01 + 0.001 * num_tokens)
        slow.step_rate.answered(num_tokens, 0.04 + 0.004 * num_tokens)
    assert pool.line_of(fast) == pytest.approx((0.01, 0.001))
    assert pool.line_of(slow) == pytest.approx((0.04, 0.004))


def test_equal_executors_share_their_rates() -> None:
    """What one of them has measured holds for all of its fingerprint, and for those of which nothing is known."""
    pool = ExecutorPool("fake", "r1")
    executors = [ExecutorState(1, make_spec()), ExecutorState(2, make_spec()), ExecutorState(3, OTHER_KIND)]
    for executor in executors:
        pool.add(executor)
    assert pool.line_of(executors[0]) == (STEP_TOKENS, 1.0)
    executors[0].step_rate.answered(10, 0.5)
    assert len({pool.line_of(executor) for executor in executors}) == 1


def test_a_slope_is_never_flat() -> None:
    """From steps of one size no slope can be told: some is assumed, and the line goes through what was measured."""
    rate = StepRate()
    for _ in range(20):
        rate.answered(64, 0.05)
    start, slope = rate.line()
    assert slope == pytest.approx(LEAST_SLOPE * 0.05 / 64, rel=0.2)
    assert start + 64 * slope == pytest.approx(0.05)


def test_a_drained_executor_gets_no_more() -> None:
    """While it drains new work and what waits there go to others, what runs there ends there; then it is as before."""
    small = make_spec(max_num_seqs=1)
    cell = make_cell(small, depth=1)
    records = [make_record(counter, max_tokens=6) for counter in range(1, 5)]
    for record in records[:3]:
        cell.submit(record)
    cell.schedule(1)
    cell.add_executor(make_spec())
    cell.engine.set_draining(1, is_draining=True)
    cell.check_invariants()
    assert sessions_of(cell) == [1, 2, 2]
    cell.submit(records[3])
    assert sessions_of(cell) == [1, 2, 2, 2]
    cell.settle()
    for record in records:
        assert cell.gateway.tokens[record.id, 0] == undisturbed(record, 0)[0]
    cell.engine.set_draining(1, is_draining=False)
    assert {where(cell, counter) for counter in range(5, 8)} == {1, 2}


def test_the_last_executor_drains_to_nobody() -> None:
    """One that drains still gets what nobody else can take."""
    cell = make_cell(make_spec())
    cell.engine.set_draining(1, is_draining=True)
    assert where(cell, 1) == 1
