"""A full queue: whom it has no place for, and what they are told."""

from __future__ import annotations

import grpc
import pytest

from octavo.rpc.full_queue import LONGEST_WAIT, SHORTEST_WAIT, UNKNOWN_WAIT, FullQueue


@pytest.mark.parametrize(
    ("max_choices", "max_tokens", "choices", "tokens", "fits"),
    [
        (10, None, 3, 1000, True),
        (10, None, 4, 1, False),
        (None, 50, 2, 10, True),
        (None, 50, 1, 21, False),
        (10, 50, 3, 7, False),
        (None, None, 1000, 1000, True),
    ],
)
def test_both_bounds_hold(
    max_choices: int | None, max_tokens: int | None, choices: int, tokens: int, fits: bool
) -> None:
    """Seven choices of thirty tokens wait: a request fits that leaves both sums within bounds, if there are any."""
    assert FullQueue(7, 30, max_choices, max_tokens).fits(choices, tokens) is fits


@pytest.mark.parametrize(
    ("drained", "choices", "delay"),
    [
        (None, 1, UNKNOWN_WAIT),
        ((0.5, 1000.0), 1, 2.0),
        ((0.5, 1000.0), 5, 10.0),
        ((100.0, 1.0), 1, 4.0),
        ((1e6, 1e6), 1, SHORTEST_WAIT),
        ((1e-6, 1e6), 1, LONGEST_WAIT),
    ],
)
def test_the_delay_is_what_the_excess_takes_to_leave(
    drained: tuple[float, float] | None, choices: int, delay: float
) -> None:
    """By the slower of both rates, between the shortest and the longest wait that are told."""
    error = FullQueue(10, 100, 10, 100, drained).refusal(choices, 4)
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.retry_delay == pytest.approx(delay)
    assert f"try again in {delay:.1f} s" in error.message


def test_more_of_both_is_a_fuller_queue() -> None:
    """Choices and tokens add up; nothing more is the same queue."""
    queue = FullQueue(7, 30, 10, 50, (1.0, 2.0))
    assert queue.plus(0, 0) is queue
    fuller = queue.plus(2, 15)
    assert (fuller, fuller.drained) == (FullQueue(9, 45, 10, 50), (1.0, 2.0))
    assert fuller.fits(1, 5)
    assert not fuller.fits(1, 6)


@pytest.mark.parametrize(
    ("max_choices", "max_tokens", "choices", "tokens"),
    [(10, 50, 10, 50), (None, 50, 12, 50), (10, None, 10, 60), (None, None, 12, 60), (5, 20, 7, 30)],
)
def test_what_does_not_fit_is_not_in_it(
    max_choices: int | None, max_tokens: int | None, choices: int, tokens: int
) -> None:
    """Of what has been sent and not answered, that which is beyond a bound will be refused: it does not wait."""
    fuller = FullQueue(7, 30, max_choices, max_tokens).plus(5, 30)
    assert (fuller.num_choices, fuller.num_tokens) == (choices, tokens)


@pytest.mark.parametrize(
    ("max_choices", "max_tokens", "is_half_empty"),
    [(14, None, True), (13, None, False), (None, 60, True), (None, 59, False), (14, 59, False), (14, 60, True)],
)
def test_a_queue_is_half_empty_by_both_bounds(
    max_choices: int | None, max_tokens: int | None, is_half_empty: bool
) -> None:
    """Seven choices of thirty tokens wait: twice that has to be allowed."""
    assert FullQueue(7, 30, max_choices, max_tokens).is_half_empty is is_half_empty


def test_rates_make_no_difference_between_two() -> None:
    """They change with every step: who is told of changes is not to be told of that."""
    assert FullQueue(1, 2, 3, 4, (0.5, 1.0)) == FullQueue(1, 2, 3, 4, (0.6, 1.0))
    assert FullQueue(1, 2, 3, 4) != FullQueue(1, 3, 3, 4)
