"""Poisson arrivals: seeded, and as random as they should be."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest

from octavo.bench.arrivals import poisson_arrivals


def test_gaps_are_exponential() -> None:
    """Mean, deviation and the whole distribution of 20,000 gaps fit an exponential one of the rate (KS at 1%)."""
    rate = 5.0
    arrivals = [0.0, *poisson_arrivals(rate, seed=1, num_requests=20_000)]
    gaps = sorted(later - earlier for earlier, later in pairwise(arrivals))
    assert statistics.fmean(gaps) == pytest.approx(1 / rate, rel=0.03)
    assert statistics.pstdev(gaps) == pytest.approx(1 / rate, rel=0.03)
    distance = max(
        abs((rank + 0.5) / len(gaps) - (1 - math.exp(-rate * gap))) + 0.5 / len(gaps) for rank, gap in enumerate(gaps)
    )
    assert distance < 1.63 / math.sqrt(len(gaps))


def test_counts_vary_as_much_as_they_average() -> None:
    """Requests per second have variance = mean, the mark of a Poisson process: evenly spaced ones would have none."""
    arrivals = poisson_arrivals(8.0, seed=2, duration=4_000.0)
    counts = [0] * 4_000
    for arrival in arrivals:
        counts[int(arrival)] += 1
    assert statistics.fmean(counts) == pytest.approx(8.0, rel=0.05)
    assert statistics.pvariance(counts) == pytest.approx(8.0, rel=0.1)


def test_a_seed_gives_the_same_times_and_another_others() -> None:
    """A run can be repeated; a longer one begins with the shorter one's arrivals."""
    short, long = (poisson_arrivals(3.0, seed=7, num_requests=count) for count in (10, 50))
    assert long[:10] == short
    assert poisson_arrivals(3.0, seed=8, num_requests=10) != short


def test_a_duration_bounds_the_times_and_a_number_the_count() -> None:
    """Whichever of the two comes first ends the arrivals; without either there would be no end."""
    bounded = poisson_arrivals(10.0, seed=0, duration=2.0)
    assert bounded == sorted(bounded)
    assert all(0 < arrival < 2.0 for arrival in bounded)
    assert poisson_arrivals(10.0, seed=0, duration=2.0, num_requests=5) == bounded[:5]
    assert poisson_arrivals(10.0, seed=0, duration=2.0, num_requests=10_000) == bounded
    with pytest.raises(ValueError, match="number of requests or a duration"):
        poisson_arrivals(1.0, seed=0)
    with pytest.raises(ValueError, match="above 0"):
        poisson_arrivals(0.0, seed=0, num_requests=1)
