"""Too little memory: who is refused, who gives way, and that nobody's tokens change."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import pytest
from cells import Cell, make_cell
from fakes import make_record, make_spec, undisturbed

from octavo.rpc.errors import ServiceError
from scheduler_svc.batch import ScheduledRow
from scheduler_svc.batch_builder import MAX_VICTIMS
from scheduler_svc.policies.base import BaseScheduler, SequenceStatus, SequenceView
from scheduler_svc.policies.fcfs import FcfsScheduler
from scheduler_svc.request_record import ChoiceEnd, ChoiceRecord, FinishReason, RequestRecord


def assert_undisturbed(cell: Cell, records: Sequence[RequestRecord], max_model_len: int = 256) -> None:
    """Every choice has the tokens and the end of a run alone, and every block is free again."""
    for record in records:
        assert cell.gateway.done[record.id].error is None
        for choice in range(len(record.choices)):
            got = cell.gateway.tokens[record.id, choice], cell.gateway.ends[record.id, choice]
            assert got == undisturbed(record, choice, max_model_len=max_model_len)
    assert cell.engine.load().kv_usage == 0.0


def test_c1_what_exceeds_the_memory_is_refused_at_once_and_blocks_nobody() -> None:
    """C1: a pool of 8 blocks refuses a request for 9 with the numbers; one for 8 runs, and a small one after it."""
    cell = make_cell(make_spec(num_blocks=9, block_size=4, max_model_len=1000))
    with pytest.raises(ServiceError, match="need 9 KV blocks of 4 tokens; the largest executor has 8") as caught:
        cell.submit(make_record(1, prompt=range(30), max_tokens=4))
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.reason == "EXCEEDS_KV_MEMORY"
    assert caught.value.metadata["blocks_needed"] == "9"
    assert caught.value.metadata["blocks_total"] == "8"
    assert cell.engine.load().num_requests == 0
    # 33 tokens, of which the last is never computed, are 8 blocks.
    largest, small = make_record(2, prompt=range(30), max_tokens=3), make_record(3, max_tokens=2)
    cell.submit(largest)
    cell.submit(small)
    cell.settle()
    assert_undisturbed(cell, [largest, small])


@pytest.mark.parametrize("num_prompt_tokens", [31, 32, 33, 500])
@pytest.mark.parametrize("max_tokens", [1, 1000])
def test_c2_prompts_around_the_model_length(num_prompt_tokens: int, max_tokens: int) -> None:
    """C2: limit - 1 tokens get their one token; from the limit on the prompt is refused, with both numbers."""
    cell = make_cell(make_spec(max_model_len=32))
    record = make_record(prompt=[1] * num_prompt_tokens, max_tokens=max_tokens)
    if num_prompt_tokens < 32:
        cell.submit(record)
        cell.settle()
        assert len(cell.gateway.tokens[record.id, 0]) == 1
        assert cell.gateway.ends[record.id, 0] == ChoiceEnd(FinishReason.LENGTH)
        return
    with pytest.raises(ServiceError) as caught:
        cell.submit(record)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.metadata == {"prompt_tokens": str(num_prompt_tokens), "max_model_len": "32"}
    assert [violation.field for violation in caught.value.violations] == ["input"]
    assert cell.engine.load().num_requests == 0


def test_admission_leaves_a_block_for_each_that_runs() -> None:
    """The head waits until the others can each grow by a block beside it, rather than be evicted right away."""
    cell = make_cell(make_spec(num_blocks=5, block_size=4), depth=1)
    cell.submit(make_record(1, prompt=[1] * 4, max_tokens=9))
    cell.submit(make_record(2, prompt=[2] * 8, max_tokens=2))
    batch = cell.schedule()
    assert batch is not None
    assert batch.rows == (ScheduledRow(1, 4, 0, (1,)), ScheduledRow(2, 8, 0, (2, 3)))
    cell = make_cell(make_spec(num_blocks=4, block_size=4), depth=1)
    cell.submit(make_record(1, prompt=[1] * 4, max_tokens=8))
    cell.submit(make_record(2, prompt=[2] * 8, max_tokens=2))
    batch = cell.schedule()
    assert batch is not None
    assert batch.rows == (ScheduledRow(1, 4, 0, (1,)),)


def two_that_collide(depth: int) -> tuple[Cell, RequestRecord, RequestRecord]:
    """Return a cell of 4 blocks with two sequences that need 3 each in the end, and the two records, older first."""
    cell = make_cell(make_spec(num_blocks=5, block_size=4), depth=depth)
    old = make_record(1, prompt=[1] * 4, max_tokens=9, age=10.0)
    young = make_record(2, prompt=[2] * 4, max_tokens=9)
    cell.submit(old)
    cell.submit(young)
    return cell, old, young


def test_a_victims_blocks_serve_the_very_batch_that_evicts_it() -> None:
    """The younger gives way when the older needs its third block: released and reused in one batch, id by id."""
    cell, old, young = two_that_collide(depth=1)
    while cell.engine.load().num_preemptions == 0:
        batch = cell.schedule()
        assert batch is not None
        if cell.engine.load().num_preemptions == 0:
            cell.run()
    assert batch.released_handles == (2,)
    # The younger held 2 and 4; its tail is free first.
    assert batch.rows == (ScheduledRow(1, 1, 8, (4,)),)
    cell.settle()
    assert_undisturbed(cell, [old, young])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_c6_a_tiny_pool_gives_the_same_tokens(depth: int) -> None:
    """C6: prompts and output are recomputed together: a pool that preempts all the time changes no token."""
    spec = make_spec(num_blocks=13, block_size=2, max_num_seqs=5, max_num_batched_tokens=9)
    cell = make_cell(spec, depth=depth)
    records = [make_record(counter, prompt=[counter] * 5, max_tokens=18) for counter in range(1, 9)]
    for record in records:
        cell.submit(record)
    cell.settle()
    assert cell.engine.load().num_preemptions >= 8
    assert_undisturbed(cell, records)
    assert cell.engine.load().num_desyncs == 0


@pytest.mark.parametrize("depth", [2, 3])
def test_c7_tokens_in_flight_at_preemption_are_committed_once(depth: int) -> None:
    """C7: preempted between launch and result, a sequence keeps what is on its way, and only then starts again."""
    cell, old, young = two_that_collide(depth)
    while cell.engine.load().num_preemptions == 0:
        if cell.schedule() is None:
            cell.run()
    known = len(cell.gateway.tokens[young.id, 0])
    in_flight = [row for batch in cell.sent[1] for row in batch.rows if row.handle == 2]
    assert in_flight
    new_sequences = []
    while not new_sequences:
        batch = cell.schedule()
        if batch is None or not batch.new_sequences:
            cell.run()
        else:
            new_sequences = list(batch.new_sequences)
    assert len(cell.gateway.tokens[young.id, 0]) == known + len(in_flight)
    assert new_sequences[0].token_ids == (*young.prompt_token_ids, *cell.gateway.tokens[young.id, 0])
    assert new_sequences[0].num_prompt_tokens == 4
    cell.settle()
    assert_undisturbed(cell, [old, young])


@pytest.mark.parametrize("depth", [2, 3])
def test_c7_room_alone_does_not_bring_a_preempted_sequence_back(depth: int) -> None:
    """C7: with the pool empty, a victim still waits for the rows it has in flight: its record is not whole before."""
    cell, old, young = two_that_collide(depth)
    while cell.engine.load().num_preemptions == 0:
        if cell.schedule() is None:
            cell.run()
    cell.cancel(old.id)
    while any(row.handle == 2 for batch in cell.sent[1] for row in batch.rows):
        batch = cell.schedule()
        assert batch is None or not batch.new_sequences
        cell.run()
    batch = cell.schedule()
    assert batch is not None
    assert batch.new_sequences[0].token_ids == (*young.prompt_token_ids, *cell.gateway.tokens[young.id, 0])
    cell.settle()
    assert_undisturbed(cell, [young])


def test_a_preempted_sequence_goes_before_all_that_have_not_started() -> None:
    """Requests that came meanwhile, even older ones by their age, wait behind what had started."""
    cell, old, young = two_that_collide(depth=1)
    while cell.engine.load().num_preemptions == 0:
        cell.schedule()
        cell.run()
    elder = make_record(3, prompt=[3], max_tokens=2, age=1000.0)
    cell.submit(elder)
    cell.settle()
    order = [new.request[1] for batch in cell.batches for new in batch.new_sequences]
    assert order == [1, 2, 2, 3]
    assert_undisturbed(cell, [old, young, elder])


def test_c4_two_steps_in_flight_and_a_full_pool_still_move() -> None:
    """C4: blocks of a victim count at once, so one eviction a need is enough and every step has a row."""
    cell, old, young = two_that_collide(depth=2)
    while cell.engine.load().num_requests:
        batch = cell.schedule()
        if batch is None:
            cell.run()
        elif cell.engine.load().num_requests > 1:
            assert batch.rows
    assert cell.engine.load().num_preemptions == 1
    cell.settle()
    assert_undisturbed(cell, [old, young])


@pytest.mark.parametrize("depth", [1, 2])
def test_c3_a_crowd_under_pressure_is_served_to_the_last(depth: int) -> None:
    """C3: at an occupancy near 100 % somebody commits a token at least every few rounds, until all have ended."""
    cell = make_cell(make_spec(num_blocks=11, block_size=3, max_num_seqs=8, max_num_batched_tokens=16), depth=depth)
    records = [make_record(counter, prompt=[counter] * (counter % 9 + 1), max_tokens=20) for counter in range(1, 25)]
    for record in records:
        cell.submit(record)
    idle = 0
    while cell.engine.load().num_requests:
        before = sum(map(len, cell.gateway.tokens.values()))
        assert cell.round()
        idle = 0 if sum(map(len, cell.gateway.tokens.values())) > before else idle + 1
        assert idle <= 4
    cell.settle()
    assert_undisturbed(cell, records)


def test_a_lone_sequence_that_fits_exactly_runs_to_its_end() -> None:
    """No reserve is held back from a sequence that has the pool to itself: it may use the last slot."""
    cell = make_cell(make_spec(num_blocks=4, block_size=4, max_model_len=100), depth=2)
    record = make_record(prompt=[1] * 5, max_tokens=8)
    cell.submit(record)
    cell.settle()
    assert cell.engine.load().num_preemptions == 0
    assert_undisturbed(cell, [record])


def test_c8_the_pipeline_changes_no_token() -> None:
    """C8: over many seeds, lengths and choices, depth 2 and 3 give what depth 1 gives, token for token."""
    outputs = []
    for depth in (1, 2, 3):
        spec = make_spec(num_blocks=40, block_size=3, max_num_seqs=6, max_num_batched_tokens=11)
        cell = make_cell(spec, depth=depth)
        for seed in range(40):
            choices = [ChoiceRecord()] * (1 + seed % 3)
            prompt = [seed] * (1 + seed % 13)
            cell.submit(make_record(seed, prompt, seed=seed, max_tokens=12, stop_token_ids=[1, 2], choices=choices))
        cell.settle()
        outputs.append((cell.gateway.tokens, cell.gateway.ends))
    assert outputs[0] == outputs[1] == outputs[2]


def test_c11_a_long_prompt_cannot_stall_a_decoder() -> None:
    """C11: while a prompt of many chunks goes in, the decoder has a row in every single step."""
    cell = make_cell(make_spec(max_num_batched_tokens=5), depth=2)
    victim, attacker = make_record(1, max_tokens=60), make_record(2, prompt=[1] * 200, max_tokens=1)
    cell.submit(victim)
    cell.schedule()
    cell.run()
    cell.submit(attacker)
    for _ in range(50):
        batch = cell.schedule()
        assert batch is not None
        assert batch.rows[0].handle == 1
        assert sum(row.num_scheduled_tokens for row in batch.rows) == 5
        cell.run()
    assert len(cell.gateway.tokens[victim.id, 0]) == 51
    cell.settle()
    assert_undisturbed(cell, [victim, attacker])


def test_a_budget_below_the_row_limit_bounds_who_runs() -> None:
    """No more sequences run than the budget has tokens, so each still decodes in every step."""
    cell = make_cell(make_spec(max_num_batched_tokens=3, max_num_seqs=16), depth=1)
    records = [make_record(counter, prompt=[counter], max_tokens=5) for counter in range(1, 7)]
    for record in records:
        cell.submit(record)
    batch = cell.schedule()
    assert batch is not None
    assert [row.handle for row in batch.rows] == [1, 2, 3]
    cell.run()
    batch = cell.schedule()
    assert batch is not None
    assert [row.handle for row in batch.rows] == [1, 2, 3]
    cell.settle()
    assert_undisturbed(cell, records)


class SmallestFirst(FcfsScheduler):
    """A policy that lets shorter prompts evict the longest that runs."""

    def admission_key(self, view: SequenceView, now: float) -> tuple[float, ...]:
        return (view.num_prompt_tokens,)

    def choose_victim(self, running: Sequence[SequenceView], wanting: SequenceView, now: float) -> SequenceView | None:
        longest = max(running, key=lambda view: view.num_prompt_tokens)
        if wanting.status is SequenceStatus.WAITING and longest.num_prompt_tokens <= wanting.num_prompt_tokens:
            return None
        return longest


def test_a_policy_may_evict_for_one_that_waits() -> None:
    """A waiting sequence takes the row and the blocks of a running one in one batch, where the policy says so."""
    cell = make_cell(make_spec(num_blocks=4, block_size=4, max_num_seqs=1), depth=1, policy=SmallestFirst())
    long, short = make_record(1, prompt=[1] * 8, max_tokens=4), make_record(2, prompt=[2] * 2, max_tokens=4)
    cell.submit(long)
    cell.schedule()
    cell.run()
    cell.submit(short)
    batch = cell.schedule()
    assert batch is not None
    assert batch.released_handles == (1,)
    assert [(row.handle, row.num_scheduled_tokens) for row in batch.rows] == [(2, 2)]
    cell.settle()
    assert_undisturbed(cell, [long, short])


class FirstGivesWay(FcfsScheduler):
    """A policy by which only the first request ever gives way."""

    def choose_victim(self, running: Sequence[SequenceView], wanting: SequenceView, now: float) -> SequenceView | None:
        return next((view for view in running if view.request_id[1] == 1), None)


@pytest.mark.parametrize(("num_prompt_tokens", "num_preemptions"), [(16, 1), (17, 0)])
def test_nobody_is_evicted_for_one_that_would_not_fit_even_then(num_prompt_tokens: int, num_preemptions: int) -> None:
    """With 2 blocks free, 3 at the victim and one to be left for the other, 4 blocks are worth an eviction, 5 not."""
    cell = make_cell(make_spec(num_blocks=9, block_size=4), depth=1, policy=FirstGivesWay())
    records = [make_record(counter, prompt=[counter] * 8, max_tokens=9) for counter in (1, 2)]
    for record in records:
        cell.submit(record)
    cell.schedule()
    cell.run()
    wanting = make_record(3, prompt=[3] * num_prompt_tokens, max_tokens=2)
    cell.submit(wanting)
    batch = cell.schedule()
    assert batch is not None
    assert cell.engine.load().num_preemptions == num_preemptions
    assert [row.handle for row in batch.rows] == ([2, 3] if num_preemptions else [1, 2])
    cell.run()
    cell.settle()
    assert_undisturbed(cell, [*records, wanting])


class YoungestGivesWay(FcfsScheduler):
    """A policy by which request 99 evicts the youngest; counts how often it is asked for that one."""

    def __init__(self) -> None:
        self.num_asked = 0

    def choose_victim(self, running: Sequence[SequenceView], wanting: SequenceView, now: float) -> SequenceView | None:
        if wanting.request_id[1] != 99:
            return None
        self.num_asked += 1
        return running[-1]


@pytest.mark.parametrize(
    ("num_prompt_blocks", "num_preemptions", "num_asked"), [(47, MAX_VICTIMS, MAX_VICTIMS), (48, 0, 1)]
)
def test_for_one_that_waits_only_so_many_are_evicted(
    num_prompt_blocks: int, num_preemptions: int, num_asked: int
) -> None:
    """Of 32 that hold a block each 16 may give way; where they would not do, the policy is not asked for the second.

    Of 79 blocks 47 are free; 16 more make 63, of which 16 are left for those that go on.
    """
    policy = YoungestGivesWay()
    cell = make_cell(make_spec(num_blocks=80, block_size=4, max_num_seqs=64), depth=1, policy=policy)
    records = [make_record(counter, [counter], max_tokens=3) for counter in range(32)]
    for record in records:
        cell.submit(record)
    cell.schedule()
    cell.run()
    wanting = make_record(99, [49] * (4 * num_prompt_blocks), max_tokens=2)
    cell.submit(wanting)
    cell.schedule()
    assert (cell.engine.load().num_preemptions, policy.num_asked) == (num_preemptions, num_asked)
    cell.run()
    cell.settle()
    assert_undisturbed(cell, [*records, wanting])


class Stubborn(BaseScheduler):
    """A policy that never evicts, admits nothing and grants no prefill."""

    def admission_key(self, view: SequenceView, now: float) -> tuple[float, ...]:
        return (float("nan"),)

    def choose_victim(self, running: Sequence[SequenceView], wanting: SequenceView, now: float) -> SequenceView | None:
        return None

    def prefill_quota(self, view: SequenceView, budget: int) -> int:
        return 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_policy_that_grants_nothing_cannot_stop_the_engine(depth: int) -> None:
    """Where its answers leave an idle executor with work and no row, first come, first served steps in."""
    cell = make_cell(make_spec(num_blocks=6, block_size=2), depth=depth, policy=Stubborn())
    records = [make_record(counter, prompt=[counter] * 3, max_tokens=6) for counter in range(1, 5)]
    for record in records:
        cell.submit(record)
    cell.settle()
    assert_undisturbed(cell, records)
