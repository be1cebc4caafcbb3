"""What a gateway's metrics page says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from metrics_page import Page


def labelled(page: Page, name: str) -> Iterator[tuple[dict[str, str], float]]:
    """Yield the labels and value of each series of a name. No label of ours has a comma or a quote in it."""
    for series, value in page.items():
        found, _, rest = series.removesuffix("}").partition("{")
        if found == name:
            pairs = (label.split("=") for label in rest.split(",") if label)
            yield {key: text.strip('"') for key, text in pairs}, value


def value_of(page: Page, name: str, **labels: str) -> float:
    """Return the sum of a name's series over the labels that are not given; some series must be there."""
    values = [value for given, value in labelled(page, name) if labels.items() <= given.items()]
    assert values, f"no {name} with {labels}"
    return sum(values)


def check_requests_balance(page: Page) -> None:
    """Raise AssertionError unless accepted = finished + failed + cancelled + live."""
    ended = value_of(page, "octavo_requests_ended_total")
    assert value_of(page, "octavo_requests_accepted_total") == ended + value_of(page, "octavo_requests_live")
    assert value_of(page, "octavo_request_seconds_count") == ended


def endings_of(page: Page) -> Counter[tuple[str, str]]:
    """Return how often requests ended in each way, by outcome and reason; ways that did not occur are left out."""
    counts: Counter[tuple[str, str]] = Counter()
    for labels, value in labelled(page, "octavo_requests_ended_total"):
        if value:
            counts[labels["outcome"], labels["reason"]] += int(value)
    return counts


def refusals_of(page: Page) -> dict[str, int]:
    """Return how many requests were refused, by code."""
    return {labels["code"]: int(value) for labels, value in labelled(page, "octavo_requests_refused_total") if value}
