"""A service's metrics page, as Prometheus reads it."""

from __future__ import annotations

import asyncio
import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Series = tuple[str, frozenset[tuple[str, str]]]
"""Name and labels of a sample."""


@dataclass(frozen=True)
class Page:
    """The samples of one scrape."""

    samples: dict[Series, float]

    @classmethod
    def parse(cls, text: str) -> Page:
        """Read a page; no series may be on it twice."""
        samples: dict[Series, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                series = (sample.name, frozenset(sample.labels.items()))
                assert series not in samples, f"twice: {series}"
                samples[series] = sample.value
        return cls(samples)

    @property
    def series(self) -> set[Series]:
        """Every series that the page has."""
        return set(self.samples)

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of a name's samples over the labels that are not given; some sample must be there."""
        wanted = set(labels.items())
        values = [value for (each, given), value in self.samples.items() if each == name and wanted <= given]
        assert values, f"no {name} with {labels}"
        return sum(values)


async def scrape(address: str) -> Page:
    """Fetch the page of a service, by the host:port of its metrics."""

    def fetch() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
            text: str = response.read().decode()
        return text

    return Page.parse(await asyncio.to_thread(fetch))


def check_requests_balance(page: Page) -> None:
    """Raise AssertionError unless, on a gateway's page, accepted = finished + failed + cancelled + live."""
    accepted = page.value("octavo_requests_accepted_total")
    ended = page.value("octavo_requests_ended_total")
    assert accepted == ended + page.value("octavo_requests_live")
    assert page.value("octavo_request_seconds_count") == ended
