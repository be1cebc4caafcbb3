"""The measured rate at which a queue gets shorter."""

from __future__ import annotations

import pytest

from scheduler_svc.drain_rate import MEMORY_SECONDS, DrainRate


def drained(drain: DrainRate, seconds: float, *, choices: int, num_tokens: int, start: float = 0.0) -> float:
    """Build a step a second that takes `choices` choices of num_tokens tokens each and leaves some; returns the end."""
    drain.step(start, is_waiting=True)
    for second in range(1, round(seconds) + 1):
        for _ in range(choices):
            drain.left(num_tokens)
        drain.step(start + second, is_waiting=True)
    return start + seconds


def test_a_steady_rate_is_measured_as_it_is() -> None:
    """Three choices of ten tokens a second are 3 and 30 a second, after few steps and after many."""
    for seconds in (1, 5, 500):
        drain = DrainRate()
        now = drained(drain, seconds, choices=3, num_tokens=10)
        rates = drain.rates(now)
        assert rates is not None
        # What fades is counted a step late, so it is the least bit off.
        assert rates == (pytest.approx(3, rel=0.02), pytest.approx(30, rel=0.02))


def test_nothing_is_known_before_somebody_has_waited() -> None:
    """Whoever goes right through an empty queue tells nothing of how fast a queue drains."""
    drain = DrainRate()
    for second in range(5):
        drain.left(10)
        drain.step(float(second), is_waiting=False)
    assert drain.rates(10.0) is None
    assert not drain.has_left_over


def test_idle_time_does_not_count() -> None:
    """An hour in which nobody waits leaves the rate what it was."""
    drain = DrainRate()
    now = drained(drain, 10, choices=2, num_tokens=4)
    before = drain.rates(now)
    drain.step(now, is_waiting=False)
    assert drain.rates(now + 3600) == pytest.approx(before)


def test_a_stall_lowers_the_rate_as_it_lasts() -> None:
    """While somebody waits and nobody leaves, the rate falls with time, and never to nothing."""
    drain = DrainRate()
    now = drained(drain, 10, choices=2, num_tokens=4)
    rates = [drain.rates(now + seconds) for seconds in (0, 5, 50, 500)]
    choices = [each[0] for each in rates if each is not None]
    assert choices == sorted(choices, reverse=True)
    assert len(set(choices)) == 4
    assert choices[-1] > 0


def test_the_first_that_is_waited_for_counts_as_about_to_leave() -> None:
    """Where nobody has left for ten seconds, the rate is at most one in ten seconds."""
    drain = DrainRate()
    drain.step(0.0, is_waiting=True)
    assert drain.rates(10.0) == (pytest.approx(0.1), pytest.approx(0.1))


def test_it_follows_a_change() -> None:
    """A few time constants after the rate has changed tenfold, the old one is forgotten."""
    drain = DrainRate()
    now = drained(drain, 200, choices=10, num_tokens=1)
    now = drained(drain, 5 * MEMORY_SECONDS, choices=1, num_tokens=1, start=now)
    rates = drain.rates(now)
    assert rates is not None
    assert rates[0] == pytest.approx(1, rel=0.1)
