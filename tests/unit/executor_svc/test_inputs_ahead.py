"""Inputs that are built while the step before computes: when, by whom, and what makes them worthless."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes_ahead import AheadDriver, AheadRunner, PlanningModel
from fakes_executor import make_limits, make_runner, make_sequence

from executor_svc.attention import AttentionMetadata
from executor_svc.batch import RowStatus, StepBatch, StepFailureReason, StepResult
from executor_svc.inputs_ahead import InputsAhead
from executor_svc.worker import SessionEvent, Worker

TIMEOUT = 10.0
FIRST = StepBatch(
    session=1,
    step=1,
    new_sequences=(make_sequence(1, [5, 9, 2], max_tokens=9), make_sequence(2, [7, 7], max_tokens=9)),
    handles=(1, 2),
    num_scheduled_tokens=(3, 2),
    num_computed_tokens=(0, 0),
    num_new_blocks=(1, 1),
    new_blocks=(1, 2),
)
"""Two prompts."""
SECOND = StepBatch(
    session=1,
    step=2,
    handles=(1, 2),
    num_scheduled_tokens=(1, 1),
    num_computed_tokens=(3, 2),
    num_new_blocks=(0, 0),
)
"""A token more of each."""


class BlockedModel(PlanningModel):
    """Notes what happens on which thread. A forward pass whose number is in `gates` waits for its gate."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size, before_forward=self._begin)
        self.events: list[tuple[str, str]] = []
        self.gates: dict[int, threading.Event] = {}
        self.failing: set[int] = set()
        self.is_computing, self.is_planned = threading.Event(), threading.Event()

    def plan(self, metadata: AttentionMetadata, block_size: int) -> tuple[AttentionMetadata, int]:
        """See PlannedModel."""
        self._note(f"plan of {len(metadata.positions)} tokens")
        self.is_planned.set()
        return super().plan(metadata, block_size)

    def _begin(self, number: int) -> None:
        self._note(f"forward {number} begins")
        self.is_computing.set()
        if number in self.gates:
            assert self.gates[number].wait(TIMEOUT)
        if number in self.failing:
            raise RuntimeError("scripted")
        self._note(f"forward {number} goes on")

    def _note(self, event: str) -> None:
        self.events.append((event, threading.current_thread().name))


async def _two_steps(model: BlockedModel, *, failing: bool = False) -> list[StepResult]:
    """Have a worker run two steps, the second of which comes, and is planned, while the first computes."""
    runner = make_runner(make_limits(), model, builds_ahead=True)
    assert runner.ahead is not None
    worker = Worker(check_invariants=True)
    await worker.start(lambda: runner)
    runner.ahead.start()
    try:
        events: asyncio.Queue[SessionEvent] = asyncio.Queue()
        session = worker.open(1, events.put_nowait)
        model.gates[1] = threading.Event()
        model.failing = {1} if failing else set()
        session.submit(FIRST)
        assert await asyncio.to_thread(model.is_computing.wait, TIMEOUT)
        session.submit(SECOND)
        assert await asyncio.to_thread(model.is_planned.wait, TIMEOUT)
        model.gates[1].set()
        told = [await asyncio.wait_for(events.get(), TIMEOUT) for _ in range(3)]
    finally:
        model.gates[1].set()
        await worker.stop()
        runner.ahead.stop()
    return [event for event in told if isinstance(event, StepResult)]


@pytest.mark.asyncio
async def test_inputs_are_built_while_the_step_before_computes() -> None:
    """On a thread of their own, between the beginning of that step's forward pass and its end; the step's result tells
    how long it took, and the tokens are those of steps one after the other.
    """
    model = BlockedModel(make_limits().vocab_size)
    first, second = await _two_steps(model)
    assert model.events == [
        ("forward 1 begins", "device"),
        ("plan of 2 tokens", "inputs"),
        ("forward 1 goes on", "device"),
        ("forward 2 begins", "device"),
        ("forward 2 goes on", "device"),
    ]
    assert first.timings.ahead is None
    assert second.timings.ahead is not None
    assert second.timings.ahead > 0
    plain = make_runner(make_limits())
    assert [first.sampled, second.sampled] == [plain.run(FIRST).sampled, plain.run(SECOND).sampled]


@pytest.mark.asyncio
async def test_a_step_fails_whose_successor_is_built() -> None:
    """What was built is never used: the successor is refused, and its rows are lost with those of the failed step."""
    model = BlockedModel(make_limits().vocab_size)
    results = await _two_steps(model, failing=True)
    assert [each.failure and each.failure.reason for each in results] == [
        StepFailureReason.INTERNAL,
        StepFailureReason.REFUSED,
    ]
    assert [event for event, _ in model.events] == ["forward 1 begins", "plan of 2 tokens"]


@pytest.fixture(name="ahead")
def _ahead() -> AheadRunner:
    return AheadRunner(make_limits())


def _run(ahead: AheadRunner, *batches: StepBatch) -> list[StepResult]:
    """Run steps, each announced before the one before it is run."""
    results = []
    ahead.announce(batches[0])
    for batch, behind in zip(batches, (*batches[1:], None), strict=True):
        if behind is not None:
            ahead.announce(behind)
        results.append(ahead.run(batch))
    return results


def test_all_steps_but_those_behind_an_end_are_built_ahead() -> None:
    """Decode, chunks of prompts and sequences that begin in the middle: of all steps only the first, which has none
    before it, and those behind the unforeseen end of a stay are built in their turn.
    """
    driver = AheadDriver(make_limits(max_model_len=40), depth=2, chunk=3)
    for number in range(3):
        driver.add(f"early {number}", make_sequence(0, list(range(1 + 3 * number)), max_tokens=20))
    for step in range(24):
        if step == 7:
            driver.add("late", make_sequence(0, [3] * 8, max_tokens=9))
        driver.step()
    driver.finish()
    behind_an_end = [result for result in driver.results if RowStatus.SKIPPED in result.statuses]
    assert len(behind_an_end) == 4
    with_rows = [result for result in driver.results if result.handles]
    assert driver.ahead.num_adopted == len(with_rows) - 1 - len(behind_an_end)


def test_a_stop_token_makes_the_next_rows_skipped(ahead: AheadRunner) -> None:
    """A stay that ends unforeseen has no row in the next step, whose inputs are built again; then all goes on ahead."""
    token = make_runner(make_limits()).run(FIRST).sampled[0]
    assert token is not None
    stopping = replace(FIRST.new_sequences[0].stopping, stop_token_ids=(token,))
    first = replace(FIRST, new_sequences=(replace(FIRST.new_sequences[0], stopping=stopping), FIRST.new_sequences[1]))
    third = StepBatch(1, 3, (1,), (), (2,), (1,), (3,), (0,))
    fourth = StepBatch(1, 4, (), (), (2,), (1,), (4,), (1,), (3,))
    results = _run(ahead, first, SECOND, third, fourth)
    assert results[1].statuses == (RowStatus.SKIPPED, RowStatus.OK)
    assert [each.timings.ahead is not None for each in results] == [False, False, True, True]
    plain = make_runner(make_limits())
    assert [each.sampled for each in results] == [plain.run(batch).sampled for batch in (first, SECOND, third, fourth)]


def test_a_row_that_is_not_finite_is_not_counted_on() -> None:
    """Its stay has ended; the step behind is built again, without its row."""
    ahead = AheadRunner(make_limits(), nan_token=9)
    results = _run(ahead, FIRST, SECOND)
    assert results[0].statuses == (RowStatus.NAN, RowStatus.OK)
    assert results[1].statuses == (RowStatus.SKIPPED, RowStatus.OK)
    assert results[1].timings.ahead is None


def test_a_stay_is_released_while_its_row_computes(ahead: AheadRunner) -> None:
    """A cancel overtakes the row in flight: its slot and its block go to another at once, whose inputs are built ahead
    all the same, and of whom nothing is mixed up.
    """
    other = make_sequence(3, [8, 8, 8], max_tokens=9)
    second = StepBatch(1, 2, (1,), (other,), (3, 2), (3, 1), (0, 2), (1, 0), (1,))
    third = StepBatch(1, 3, (), (), (2, 3), (1, 1), (3, 3), (0, 0))
    results = _run(ahead, FIRST, second, third)
    assert [each.timings.ahead is not None for each in results] == [False, True, True]
    plain = make_runner(make_limits())
    assert [each.sampled for each in results] == [plain.run(batch).sampled for batch in (FIRST, second, third)]


ODD: dict[str, Callable[[StepBatch], StepBatch]] = {
    "an unknown handle": lambda batch: replace(batch, handles=(1, 9)),
    "a handle twice": lambda batch: replace(batch, handles=(1, 1), num_computed_tokens=(3, 3)),
    "a row of a released stay": lambda batch: replace(batch, released_handles=(1,)),
    "another count": lambda batch: replace(batch, num_computed_tokens=(2, 2)),
    "no token": lambda batch: replace(batch, num_scheduled_tokens=(0, 1)),
    "too many tokens": lambda batch: replace(batch, num_scheduled_tokens=(2, 1)),
    "a block that is not there": lambda batch: replace(batch, num_new_blocks=(1, 0), new_blocks=(64,)),
    "the null block": lambda batch: replace(batch, num_new_blocks=(0, 1), new_blocks=(0,)),
    "too many blocks": lambda batch: replace(batch, num_new_blocks=(12, 0), new_blocks=tuple(range(3, 15))),
    "a handle anew": lambda batch: replace(batch, new_sequences=(make_sequence(1, [4]),)),
    "a record that cannot run": lambda batch: replace(
        batch,
        new_sequences=(make_sequence(3, [99]),),
        handles=(1, 3),
        num_computed_tokens=(3, 0),
        num_new_blocks=(0, 1),
        new_blocks=(3,),
    ),
    "no row": lambda _: StepBatch(1, 2, (2,)),
    "columns of two lengths": lambda batch: replace(batch, num_computed_tokens=(3, 2, 1)),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_not_in_order_is_left_to_its_turn(ahead: AheadRunner, kind: str) -> None:
    """Then the same becomes of it as without building ahead."""
    plain = make_runner(make_limits())
    batch = ODD[kind](SECOND)
    ahead.announce(batch)
    assert ahead.run(FIRST).sampled == plain.run(FIRST).sampled
    if kind == "columns of two lengths":
        assert ahead.runner.run(batch).failure is not None
        return
    found, expected = ahead.run(batch), plain.run(batch)
    assert found.timings.ahead is None
    assert (found.statuses, found.sampled) == (expected.statuses, expected.sampled)
    assert RowStatus.OK in found.statuses or kind in ("no row", "another count")


def test_blocks_in_reserve_are_taken_too(ahead: AheadRunner) -> None:
    """Blocks past the last token that is computed are in the table for later steps."""
    second = replace(SECOND, num_new_blocks=(3, 0), new_blocks=(4, 5, 6))
    third = StepBatch(1, 3, (), (), (1, 2), (1, 1), (4, 3), (0, 1), (7,))
    fourth = StepBatch(1, 4, (), (), (1, 2), (1, 1), (5, 4), (0, 0))
    assert [each.timings.ahead is not None for each in _run(ahead, FIRST, second, third, fourth)][1:] == [True] * 3
    assert ahead.runner._table.block_tables[ahead.runner._table.slots([1])[0], :4].tolist() == [1, 4, 5, 6]


def test_steps_of_a_session_that_ended_are_passed_by(ahead: AheadRunner) -> None:
    """Announced, and never run: the steps of the session behind it are built in order."""
    ahead.announce(SECOND)
    ahead.run(FIRST)
    ahead.runner.reset()
    results = _run(ahead, *(replace(batch, session=2) for batch in (FIRST, SECOND)))
    assert [each.timings.ahead is not None for each in results] == [False, True]


def test_off_nothing_is_built_ahead() -> None:
    """Then there is nothing to start either."""
    runner = make_runner(make_limits())
    assert runner.ahead is None
    runner.announce(SECOND)
    assert runner.run(FIRST).timings.ahead is None
    assert runner.run(SECOND).timings.ahead is None


def test_a_stay_that_begins_has_blocks_of_its_own_alone() -> None:
    """Beside a longer row in the table's last slot, its own table is padded with the null block."""
    ahead = AheadRunner(make_limits(max_num_seqs=2))
    longer = make_sequence(2, [7] * 6, max_tokens=9)
    first = replace(FIRST, new_sequences=(FIRST.new_sequences[0], longer), num_scheduled_tokens=(3, 6))
    first = replace(first, num_new_blocks=(1, 2), new_blocks=(1, 2, 3))
    second = StepBatch(1, 2, (1,), (make_sequence(3, [8, 8, 8]),), (3, 2), (3, 1), (0, 6), (1, 0), (1,))
    assert [each.timings.ahead is not None for each in _run(ahead, first, second)] == [False, True]


def test_another_count_than_was_foreseen_is_noticed(ahead: AheadRunner) -> None:
    """Whatever made it so: then nothing is adopted, and nothing changed."""
    ahead.announce(SECOND)
    ahead.run(FIRST)
    assert ahead.runner.ahead is not None
    foreseen = ahead.runner.ahead.take(SECOND)
    assert foreseen is not None
    table = ahead.runner._table
    table.append_tokens(table.slots([1]), np.array([4]))
    assert ahead.runner._foresight.adopt(foreseen) is None
    ahead.runner.check_invariants()


def test_a_forward_pass_ends_after_a_build_under_way() -> None:
    """The table changes behind it, and the build reads the table."""
    began, gate, left = threading.Event(), threading.Event(), threading.Event()

    def foresee(*_: Any) -> None:
        began.set()
        assert gate.wait(TIMEOUT)

    builder, inputs = InputsAhead(foresee), object()
    builder.start()
    builder.announce(SECOND)

    def compute() -> None:
        with builder.computing(inputs):  # type: ignore[arg-type]  # nothing looks into it
            assert began.wait(TIMEOUT)
        left.set()

    device = threading.Thread(target=compute)
    device.start()
    assert began.wait(TIMEOUT)
    assert not left.wait(0.05)
    gate.set()
    assert left.wait(TIMEOUT)
    device.join()
    builder.stop()
