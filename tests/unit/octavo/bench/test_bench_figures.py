"""Figures: each definition against numbers worked out by hand."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.bench.figures import distribution, figures_of, percentile
from octavo.bench.records import CANCELLED, OK, Record
from octavo.bench.runner import RunResult


def record_of(
    stamps: Sequence[float],
    *,
    scheduled: float = 100.0,
    sent: float | None = None,
    ended: float | None = None,
    delta_tokens: Sequence[int] | None = None,
    output_tokens: int | None = None,
    asked_tokens: int = 3,
    status: str = OK,
    prompt_tokens: int | None = 10,
    is_counted_by_server: bool = True,
) -> Record:
    """A record; a token a delivery unless said otherwise."""
    deltas = list(delta_tokens or [1] * len(stamps))
    return Record(
        index=0,
        asked_tokens=asked_tokens,
        scheduled=scheduled,
        sent=scheduled if sent is None else sent,
        stamps=list(stamps),
        delta_tokens=deltas,
        ended=(stamps[-1] if stamps else scheduled) if ended is None else ended,
        status=status,
        prompt_tokens=prompt_tokens,
        output_tokens=sum(deltas) if output_tokens is None else output_tokens,
        is_counted_by_server=is_counted_by_server,
    )


def result_of(*records: Record, is_open_loop: bool = False, cpu_seconds: float = 0.0) -> RunResult:
    """A run that began at 100."""
    ended = max((each.ended for each in records), default=100.0)
    return RunResult(list(records), 100.0, ended, cpu_seconds, was_stopped=False, is_open_loop=is_open_loop)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([1.0, 2.0, 3.0, 4.0], 50, 2.5),
        ([1.0, 2.0, 3.0, 4.0], 90, 3.7),
        ([15.0, 20.0, 35.0, 40.0, 50.0], 40, 29.0),
        ([float(value) for value in range(101)], 99, 99.0),
        ([7.0], 99, 7.0),
        ([1.0, 2.0], 0, 1.0),
        ([1.0, 2.0], 100, 2.0),
    ],
)
def test_percentiles_of_known_samples(values: list[float], percent: float, expected: float) -> None:
    """Linear interpolation between closest ranks: the values that numpy.percentile's documentation and texts give."""
    assert percentile(values, percent) == pytest.approx(expected)


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=200))
def test_percentiles_agree_with_the_standard_library(values: list[float]) -> None:
    """statistics.quantiles with the inclusive method is the same definition."""
    ordered = sorted(values)
    cuts = statistics.quantiles(ordered, n=100, method="inclusive")
    for percent in (1, 50, 90, 99):
        assert percentile(ordered, percent) == pytest.approx(cuts[percent - 1], rel=1e-9, abs=1e-9)


def test_a_distribution_does_not_need_order_and_an_empty_one_is_none() -> None:
    """What there is no sample of is not told as zero."""
    found = distribution([0.3, 0.1, 0.2])
    assert found is not None
    assert (found.count, found.min, found.p50, found.max) == (3, 0.1, 0.2, 0.3)
    assert found.mean == pytest.approx(0.2)
    assert distribution([]) is None
    with pytest.raises(ValueError, match="no sample"):
        percentile([], 50)


def test_latencies_count_from_the_schedule() -> None:
    """A request sent 2 s late waited those 2 s too: in TTFT and end to end, and as lag."""
    late = record_of([103.0, 103.5, 104.0], scheduled=100.0, sent=102.0, ended=104.25)
    figures = figures_of(result_of(late, is_open_loop=True))
    assert figures.ttft is not None
    assert figures.e2e is not None
    assert figures.lag is not None
    assert (figures.ttft.mean, figures.e2e.mean, figures.lag.max) == (3.0, 4.25, 2.0)


def test_a_delivery_of_several_tokens_is_one_gap_and_all_its_tokens() -> None:
    """Four tokens after 0.8 s are a wait of 0.8 s, not four of 0.2 and not three of nothing; per token it is 0.2 s."""
    figures = figures_of(result_of(record_of([101.0, 101.8], delta_tokens=[2, 4])))
    assert figures.itl is not None
    assert figures.tpot is not None
    assert figures.itl.count == 1
    assert figures.itl.max == pytest.approx(0.8)
    assert figures.tpot.mean == pytest.approx(0.8 / 4)
    assert (figures.output_tokens, figures.tokens_per_delivery, figures.most_tokens_in_delivery) == (6, 3.0, 4)


def test_time_per_output_token_where_only_the_sum_is_known() -> None:
    """With usage alone, (last - first) / (tokens - 1), and the largest delivery is not made up."""
    figures = figures_of(result_of(record_of([101.0, 101.4, 101.8], output_tokens=9)))
    assert figures.tpot is not None
    assert figures.tpot.mean == pytest.approx(0.8 / 8)
    assert (figures.most_tokens_in_delivery, figures.tokens_per_delivery) == (0, 3.0)


def test_one_token_has_no_gap() -> None:
    """A request of one token has a TTFT and an end, and adds nothing to the figures between tokens."""
    figures = figures_of(result_of(record_of([101.0])))
    assert figures.ttft is not None
    assert (figures.itl, figures.tpot) == (None, None)


def test_rates_are_of_successes_over_the_whole_run() -> None:
    """Tokens of failed requests do not count as throughput; the time they took does."""
    ok = [record_of([101.0, 102.0, 103.0]) for _ in range(3)]
    failed = record_of([101.0], ended=110.0, status="UNAVAILABLE")
    figures = figures_of(result_of(*ok, failed))
    assert figures.duration == 10.0
    assert figures.request_rate == pytest.approx(0.3)
    assert figures.output_token_rate == pytest.approx(0.9)
    assert figures.total_token_rate == pytest.approx(3.9)
    assert figures.mean_concurrency == pytest.approx((3 * 3 + 10) / 10)


def test_every_request_is_counted_once_by_its_end() -> None:
    """Errors by code, most frequent first; what the generator cancelled is no error of the server."""
    statuses = [OK, "HTTP_429", "TIMEOUT", "HTTP_429", CANCELLED]
    figures = figures_of(result_of(*(record_of([101.0], status=status) for status in statuses)))
    assert (figures.num_ok, figures.num_failed, figures.num_cancelled) == (1, 3, 1)
    assert list(figures.errors.items()) == [("HTTP_429", 2), ("TIMEOUT", 1)]
    assert figures.ttft is not None
    assert figures.ttft.count == 1


def test_goodput_wants_every_objective_kept() -> None:
    """One request is late, one stalls once, one is slow on average, one fails; a request without gaps keeps them."""
    good = record_of([100.1, 100.2, 100.3])
    late = record_of([100.9, 101.0, 101.1])
    stalls = record_of([100.1, 100.11, 100.41, 100.42])
    slow = record_of([100.1, 100.29, 100.48])
    single = record_of([100.2])
    failed = record_of([100.1], status="UNAVAILABLE", ended=110.0)
    figures = figures_of(
        result_of(good, late, stalls, slow, single, failed), {"ttft": 0.5, "itl": 0.25, "tpot": 0.15, "e2e": 5.0}
    )
    assert figures.goodput is not None
    assert figures.goodput.num_good == 2
    assert figures.goodput.share == pytest.approx(2 / 6)
    assert figures.goodput.request_rate == pytest.approx(0.2)


def test_what_was_not_measured_is_told() -> None:
    """Counts by deliveries, unknown inputs and short outputs are figures of their own."""
    short = record_of([101.0, 101.1], is_counted_by_server=False, prompt_tokens=None)
    figures = figures_of(result_of(short, record_of([101.0, 101.1, 101.2])))
    assert (figures.num_counted_as_deliveries, figures.num_without_prompt_count, figures.num_short) == (1, 1, 1)


def test_the_generators_own_work_is_told_per_token() -> None:
    """CPU time is over every token that came, those of failed requests too: they cost the same."""
    failed = record_of([101.0], status="UNAVAILABLE")
    figures = figures_of(result_of(record_of([101.0, 101.5, 102.0]), failed, cpu_seconds=0.4))
    assert figures.cpu_per_token == pytest.approx(0.1)
    assert figures.cpu_share == pytest.approx(0.2)


def test_a_run_of_nothing_has_figures() -> None:
    """Stopped at once: zeros and Nones, no division by zero."""
    figures = figures_of(result_of(), {"ttft": 1.0})
    assert (figures.num_ok, figures.duration, figures.request_rate) == (0, 0.0, 0.0)
    assert (figures.ttft, figures.itl, figures.tpot, figures.e2e) == (None, None, None, None)
    assert figures.goodput is not None
    assert figures.goodput.share == 0.0
