"""Metrics pages as tests read them."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families

Page = dict[str, float]
"""Values by series, written as on the page but with labels in alphabetical order: `name{a="1",b="2"}`."""


def _page(families: Iterable[Metric]) -> Page:
    page: Page = {}
    for family in families:
        assert family.documentation, f"{family.name} does not say what it is"
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            series = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert series not in page, f"{series} is on the page twice"
            page[series] = sample.value
    return page


def page_of(registry: CollectorRegistry) -> Page:
    """Return what a registry would put on its page now; a series that is there twice is an error."""
    return _page(registry.collect())


async def scrape(port: int) -> Page:
    """Fetch a page as Prometheus does."""

    def fetch() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            text: str = response.read().decode()
        return text

    return _page(text_string_to_metric_families(await asyncio.to_thread(fetch)))
