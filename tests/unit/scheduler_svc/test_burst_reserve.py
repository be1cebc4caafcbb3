"""The burst reserve: what short newcomers have to themselves, and that nobody else starves for it."""

from __future__ import annotations

import math

import pytest
from cells import Cell, make_cell
from fakes import make_record, make_spec, undisturbed

from scheduler_svc.batch import ExecutorSpec, ScheduledBatch
from scheduler_svc.burst_reserve import BurstReserve, ReserveSettings
from scheduler_svc.policies.registry import BUILT_IN, load_policy
from scheduler_svc.request_record import RequestRecord

SPEC = make_spec(num_blocks=101, block_size=4, max_num_seqs=16, max_num_batched_tokens=40, max_model_len=500)
"""A hundred blocks: three long prompts of 25 fill three quarters."""

ROWS = make_spec(num_blocks=1000, block_size=4, max_num_seqs=6, max_num_batched_tokens=1000, max_model_len=500)
"""Blocks abound, and six may run."""


def reserve_of(share: float) -> ReserveSettings:
    """A reserve for prompts of up to ten tokens, kept for a minute."""
    return ReserveSettings(share, longest_prompt=10, idle_seconds=60.0)


def long(counter: int, *, num_tokens: int = 100, max_tokens: int = 20) -> RequestRecord:
    """A request with a long prompt."""
    return make_record(counter, prompt=[counter % 50] * num_tokens, max_tokens=max_tokens)


def short(counter: int, *, num_tokens: int = 8, max_tokens: int = 4) -> RequestRecord:
    """A request with a short prompt."""
    return make_record(counter, prompt=[counter % 50] * num_tokens, max_tokens=max_tokens)


def admitted(batch: ScheduledBatch | None) -> list[int]:
    """Counters of the requests that begin with a step."""
    return [] if batch is None else [new.request[1] for new in batch.new_sequences]


def shares(batch: ScheduledBatch | None) -> dict[int, int]:
    """Tokens of each row by handle."""
    return {} if batch is None else {row.handle: row.num_scheduled_tokens for row in batch.rows}


def assert_undisturbed(cell: Cell, records: list[RequestRecord]) -> None:
    """Every request has the output of a run alone, and every block is free again."""
    for record in records:
        got = cell.gateway.tokens[record.id, 0], cell.gateway.ends[record.id, 0]
        assert got == undisturbed(record, 0, max_model_len=500)
    assert cell.engine.load().kv_usage == 0.0


def steps_to_first_token(cell: Cell, record: RequestRecord, most: int = 2000) -> int:
    """Submit a request and run until its first token; returns the steps."""
    cell.submit(record)
    for step in range(most):
        if cell.gateway.tokens[record.id, 0]:
            return step
        cell.round()
    raise AssertionError(f"no token in {most} steps")


def in_flood(cell: Cell) -> list[RequestRecord]:
    """A cell that has just met a short request and then thirty long ones; returns them."""
    records = [short(1), *(long(counter) for counter in range(2, 32))]
    for record in records:
        cell.submit(record)
    for _ in range(12):
        cell.round()
    return records


@pytest.mark.parametrize("policy", sorted(BUILT_IN))
@pytest.mark.parametrize("depth", [1, 2])
def test_a_short_newcomer_passes_a_flood_of_long_prompts(policy: str, depth: int) -> None:
    """Behind thirty long prompts it has its first token within the steps in flight and two of its own."""
    cell = make_cell(SPEC, depth=depth, policy=load_policy(policy), reserve=reserve_of(0.2))
    records = in_flood(cell)
    newcomer = short(100)
    assert steps_to_first_token(cell, newcomer) <= depth + 2
    cell.settle()
    assert_undisturbed(cell, [*records, newcomer])


def test_without_a_reserve_it_waits_for_all_of_them() -> None:
    """The same flood without a reserve, first come, first served: an order of magnitude more steps."""
    cell = make_cell(SPEC)
    in_flood(cell)
    assert steps_to_first_token(cell, short(100)) > 40


def test_long_prompts_leave_blocks_alone_while_short_ones_come() -> None:
    """Admissions of long prompts leave what the short ones do not own of a third of the blocks."""
    spec = make_spec(num_blocks=61, block_size=4, max_num_seqs=20, max_num_batched_tokens=1000, max_model_len=500)
    cell = make_cell(spec, depth=1, reserve=reserve_of(1 / 3))
    cell.submit(short(1, max_tokens=100))
    cell.schedule()
    cell.run()
    # The short one owns 2 of the 20 blocks kept; 58 are free, a long one takes 13 and one for each that runs.
    for counter in range(2, 8):
        cell.submit(long(counter, num_tokens=52))
    assert admitted(cell.schedule()) == [2, 3]
    # A block for the short one's third token row is among those that are gone.
    assert cell.engine.load().executors[0].free_blocks == 60 - 3 - 2 * 13
    cell.run()
    cell.settle()


def test_rows_are_kept_where_blocks_abound() -> None:
    """Of six rows two are the short ones': four long ones run, then two short ones beside them, and no third."""
    cell = make_cell(ROWS, depth=1, reserve=reserve_of(1 / 3))
    for counter in range(1, 7):
        cell.submit(long(counter, max_tokens=100))
    cell.submit(short(7, max_tokens=1))
    assert sorted(admitted(cell.schedule())) == [1, 2, 3, 4, 7]
    cell.run()
    for counter in range(8, 11):
        cell.submit(short(counter, max_tokens=100))
    assert admitted(cell.schedule()) == [8, 9]
    cell.run()
    assert admitted(cell.schedule()) == []
    cell.run()
    cell.settle()


def test_short_ones_get_their_share_of_a_steps_tokens_before_a_long_prefill() -> None:
    """A long prefill leaves ten of forty tokens to short newcomers, and takes all where there are none."""
    cell = make_cell(SPEC, depth=1, reserve=reserve_of(0.25))
    cell.submit(long(1, num_tokens=300))
    assert shares(cell.schedule()) == {1: 40}
    cell.run()
    cell.submit(short(2))
    cell.submit(short(3))
    # Eight tokens, and two of the next one's eight.
    assert shares(cell.schedule()) == {2: 8, 3: 2, 1: 30}
    cell.run()
    assert shares(cell.schedule()) == {2: 1, 3: 6, 1: 33}
    cell.run()
    cell.settle()


def test_what_a_long_prefill_does_not_want_of_a_step_is_the_short_ones() -> None:
    """Where it needs only five tokens more, short ones get all the rest of the step."""
    cell = make_cell(SPEC, depth=1, reserve=reserve_of(0.25))
    cell.submit(long(1, num_tokens=45))
    cell.schedule()
    cell.run()
    for counter in range(2, 5):
        cell.submit(short(counter))
    assert shares(cell.schedule()) == {1: 5, 2: 8, 3: 8, 4: 8}
    cell.run()
    cell.settle()


def test_the_reserve_is_given_back_when_no_short_one_comes() -> None:
    """A minute after the last short newcomer the long ones take every row; for the next one nobody is evicted."""
    cell = make_cell(ROWS, depth=1, reserve=reserve_of(0.5))
    cell.submit(short(1, max_tokens=1))
    cell.schedule()
    cell.run()
    for counter in range(2, 12):
        cell.submit(long(counter, max_tokens=3))
    assert admitted(cell.schedule()) == [2, 3, 4]
    cell.run()
    cell.now += 59.0
    assert admitted(cell.schedule()) == []
    cell.run()
    cell.now += 1.0
    assert admitted(cell.schedule()) == [5, 6, 7]
    cell.run()
    cell.submit(short(12, max_tokens=50))
    # The first three have ended. Those in the rows of the reserve stay, and no further one gets in beside them.
    assert admitted(cell.schedule()) == [12]
    cell.run()
    assert cell.engine.load().num_preemptions == 0
    cell.settle()


def test_before_the_first_short_one_nothing_is_kept() -> None:
    """From the start until the first short prompt comes, long ones have everything."""
    cell = make_cell(ROWS, depth=1, reserve=reserve_of(0.5))
    for counter in range(1, 8):
        cell.submit(long(counter))
    assert admitted(cell.schedule()) == [1, 2, 3, 4, 5, 6]
    cell.run()
    cell.settle()


def rounds_under_short_ones(cell: Cell, target: RequestRecord, most: int = 1500) -> int:
    """Keep ten short ones waiting until the target has ended; returns the rounds."""
    cell.submit(target)
    counter = 1000
    for rounds in range(most):
        if target.id in cell.gateway.done:
            return rounds
        while cell.engine.load().num_waiting < 10:
            counter += 1
            cell.submit(short(counter, max_tokens=1 + counter % 30))
        cell.round()
        cell.now += 0.01
    raise AssertionError(f"not served in {most} rounds")


@pytest.mark.parametrize("num_tokens", [100, 300, 316, 317, 390])
@pytest.mark.parametrize(
    "spec", [SPEC, make_spec(num_blocks=101, block_size=4, max_num_seqs=2, max_model_len=500)], ids=["16 rows", "2"]
)
def test_a_flood_of_short_ones_starves_no_long_prompt(num_tokens: int, spec: ExecutorSpec) -> None:
    """However long, beside the reserve or only without it, the head of the queue is served while short ones pour in."""
    cell = make_cell(spec, reserve=reserve_of(0.2))
    for counter in range(1, 10):
        cell.submit(short(counter))
    cell.round()
    target = long(500, num_tokens=num_tokens, max_tokens=5)
    assert rounds_under_short_ones(cell, target) < 300
    cell.settle()
    assert_undisturbed(cell, [target])


@pytest.mark.parametrize("budget", [2, 3, 8])
def test_a_long_prefill_goes_on_under_the_smallest_budget(budget: int) -> None:
    """With a budget of a few tokens a step and a reserve of most of it, a long prefill still ends."""
    spec = make_spec(num_blocks=101, block_size=4, max_num_seqs=8, max_num_batched_tokens=budget, max_model_len=500)
    cell = make_cell(spec, reserve=reserve_of(0.9))
    assert rounds_under_short_ones(cell, long(1, num_tokens=30, max_tokens=2)) < 1000
    cell.settle()


def test_short_prompts_that_the_reserve_cannot_hold_wait_in_the_queue() -> None:
    """A reserve of two blocks is no lane for prompts of three; it is for those of one."""
    spec = make_spec(num_blocks=41, block_size=4, max_num_seqs=40, max_num_batched_tokens=1000, max_model_len=500)
    cell = make_cell(spec, depth=1, reserve=reserve_of(0.05))
    cell.submit(long(1, num_tokens=120))
    cell.schedule()
    cell.run()
    cell.submit(long(2, num_tokens=60))
    cell.submit(short(3, num_tokens=10))
    cell.submit(short(4, num_tokens=3))
    assert admitted(cell.schedule()) == [4]
    cell.run()
    cell.settle()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9])
@pytest.mark.parametrize(("num_blocks", "max_running"), [(1, 1), (1, 5), (5, 1), (2, 2), (100, 64)])
def test_somebody_else_can_always_run(share: float, num_blocks: int, max_running: int) -> None:
    """The reserve is a share rounded up, but never all blocks or all rows; where only one can run there is none."""
    reserve = BurstReserve(reserve_of(share), num_blocks, max_running, budget=32)
    assert reserve.is_on == (share > 0 and num_blocks > 1 and max_running > 1)
    if reserve.is_on:
        assert reserve.num_blocks == min(math.ceil(share * num_blocks), num_blocks - 1)
        assert reserve.num_rows == min(math.ceil(share * max_running), max_running - 1)
    else:
        assert reserve.num_blocks == reserve.num_rows == reserve.num_tokens == 0
    for budget in range(1, 40):
        assert 0 <= reserve.allowance(budget, demand=1000) <= budget // 2
        assert reserve.allowance(budget, demand=0) == budget
