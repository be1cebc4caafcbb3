"""Our histograms: the same page as prometheus_client's own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from metrics_page import page_of
from prometheus_client import CollectorRegistry, Histogram

from octavo.rpc.metrics import HOP_SECONDS as BOUNDS
from octavo.rpc.metrics import DistributionFamily

VALUES = st.sampled_from(BOUNDS) | st.floats(0, 2)


@given(values=st.lists(VALUES, max_size=30))
def test_a_distribution_counts_as_a_histogram_does(values: list[float]) -> None:
    """Buckets (upper ends included), sum and count are those of prometheus_client for the same values."""
    expected, registry = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("seconds", "Some time.", buckets=BOUNDS, registry=expected)
    family = DistributionFamily("seconds", "Some time.", BOUNDS)
    registry.register(family)
    for value in values:
        histogram.observe(value)
        family.member().observe(value)
    assert page_of(registry) == page_of(expected)


@given(values=st.lists(st.tuples(st.sampled_from("ab"), VALUES), max_size=20))
def test_each_value_of_a_label_has_a_distribution_of_its_own(values: list[tuple[str, float]]) -> None:
    """All of them are on the page from the start, and each counts its own values only."""
    expected, registry = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("seconds", "Some time.", ["part"], buckets=BOUNDS, registry=expected)
    family = DistributionFamily("seconds", "Some time.", BOUNDS, label="part", values="ab")
    registry.register(family)
    for part in "ab":
        histogram.labels(part)
    for part, value in values:
        histogram.labels(part).observe(value)
        family.member(part).observe(value)
    assert page_of(registry) == page_of(expected)
