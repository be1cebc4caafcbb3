"""What is foretold of steps: never more than what was seen allows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.batch import StageTimings
from scheduler_svc.step_clock import MIN_SAMPLES, NUM_SAMPLES, STALE_AFTER, StepClock


def clock_of(*steps: tuple[int, float], now: float = 0.0) -> StepClock:
    """Return a clock that has seen steps (tokens, seconds), one after the other, the last one answered at `now`."""
    clock = StepClock()
    at = now - sum(seconds for _, seconds in steps)
    for num_tokens, seconds in steps:
        clock.answered(num_tokens, at, at + seconds, None)
        at += seconds
    return clock


def test_nothing_is_foretold_before_enough_was_seen() -> None:
    """Two steps of a size say nothing, three do."""
    steps = [(8, 0.5)] * (MIN_SAMPLES - 1)
    assert clock_of(*steps).seconds(8, 0.0) == 0.0
    assert clock_of(*steps, (8, 0.5)).seconds(8, 0.0) == pytest.approx(0.5)


def test_a_hiccup_moves_nothing() -> None:
    """The median holds against steps that took a hundred times as long, as the first of a process do."""
    assert clock_of((8, 9.0), (8, 0.1), (8, 0.1)).seconds(8, 0.0) == pytest.approx(0.1)
    steps = [(8, 0.1)] * (NUM_SAMPLES - 5) + [(8, 9.0)] * 5
    assert clock_of(*steps, now=0.0).seconds(8, 0.0) == pytest.approx(0.1)


def test_a_change_is_learned() -> None:
    """Once most of what is remembered is slower, so is what is foretold."""
    steps = [(8, 0.01)] * 50 + [(8, 0.3)] * (NUM_SAMPLES // 2 + 1)
    assert clock_of(*steps).seconds(8, 0.0) == pytest.approx(0.3)


def test_other_sizes_are_bounded_from_below() -> None:
    """A larger step takes no less time than one seen, a smaller one no less for each token; the best bound counts."""
    clock = clock_of(*[(64, 0.4)] * 3)
    assert clock.seconds(512, 0.0) == pytest.approx(0.4)
    assert clock.seconds(16, 0.0) == pytest.approx(0.1)
    clock = clock_of(*[(4, 0.2)] * 3, *[(64, 0.4)] * 3)
    assert clock.seconds(16, 0.0) == pytest.approx(0.2)
    assert clock.seconds(60, 0.0) == pytest.approx(0.375)


@given(
    fixed=st.floats(0, 0.1),
    per_token=st.floats(1e-6, 0.01),
    seen=st.lists(st.integers(1, 600), min_size=1, max_size=6),
    asked=st.integers(1, 600),
)
def test_no_forecast_exceeds_the_truth(fixed: float, per_token: float, seen: list[int], asked: int) -> None:
    """Where a step takes a + b * tokens, whatever sizes were seen, no forecast is above that."""
    steps = [(size, fixed + per_token * size) for size in seen for _ in range(MIN_SAMPLES)]
    clock = StepClock()
    for size, seconds in steps:
        clock.answered(size, 0.0, 0.0, StageTimings(0.0, 0.0, seconds, 0.0))
    assert clock.seconds(asked, 0.0) <= (fixed + per_token * asked) * (1 + 1e-9)


def test_what_waited_behind_another_step_is_timed_from_its_answer() -> None:
    """With two steps in flight a step's time is the time between two answers, not since it was sent."""
    clock = StepClock()
    for number in range(4):
        clock.answered(8, max(0, number - 1) * 0.2, (number + 1) * 0.2, None)
    assert clock.seconds(8, 0.8) == pytest.approx(0.2)


def test_the_executors_own_timings_count_where_there_are_any() -> None:
    """They hold no wait in its queue, and no delay of the answer."""
    clock = StepClock()
    for number in range(3):
        clock.answered(8, number, number + 0.9, StageTimings(queue=0.5, prepare=0.01, forward=0.2, sample=0.04))
    assert clock.seconds(8, 3.0) == pytest.approx(0.25)


def test_an_old_measurement_counts_no_more() -> None:
    """What nothing has confirmed for a while is forgotten, so that work is tried again and measured anew."""
    clock = clock_of(*[(8, 5.0)] * NUM_SAMPLES, now=0.0)
    assert clock.seconds(8, STALE_AFTER) == pytest.approx(5.0)
    later = STALE_AFTER + 0.1
    assert clock.seconds(8, later) == 0.0
    for number in range(MIN_SAMPLES):
        clock.answered(8, later + number, later + number + 0.1, None)
    assert clock.seconds(8, later + MIN_SAMPLES) == pytest.approx(0.1)


def test_failed_and_empty_steps_teach_nothing() -> None:
    """But the step behind one is not charged for it."""
    clock = StepClock()
    for number in range(4):
        start = number * 10.0
        clock.answered(0, start, start + 3.0, None)
        clock.answered(8, start, start + 3.5, None)
    assert clock.seconds(8, 34.0) == pytest.approx(0.5)


def test_a_prompt_takes_its_chunks() -> None:
    """10 tokens at a budget of 4 are 3 steps; of the first alone those that decode now have their share."""
    clock = clock_of(*[(4, 0.4)] * 3, *[(2, 0.3)] * 3, *[(1, 0.2)] * 3)
    assert clock.seconds_to_compute(10, 4, 0, 0.0) == pytest.approx(0.4 + 0.4 + 0.3)
    assert clock.seconds_to_compute(10, 4, 1, 0.0) == pytest.approx(0.4 + 0.4 + 0.3)
    assert clock.seconds_to_compute(10, 4, 3, 0.0) == pytest.approx(3 * 0.4 + 0.2)
    assert clock.seconds_to_compute(1, 4, 1, 0.0) == pytest.approx(0.3)
    # However many decode, a step has a token left for the prompt.
    assert clock.seconds_to_compute(2, 4, 99, 0.0) == pytest.approx(0.4 + 0.2)
    assert StepClock().seconds_to_compute(10, 4, 0, 0.0) == 0.0
