"""The tables of docs/running.md list the metrics that the services really have."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from pathlib import Path

import pytest
from factories import make_llama
from prometheus_client.parser import text_string_to_metric_families
from stack import in_process

from octavo.models.prepare import prepare
from octavo.models.prepared import open_prepared

PAGE = (Path(__file__).parents[2] / "docs" / "running.md").read_text()
_ROW = re.compile(r"^\| `(octavo_\w+)` \| (\w+) \| ([\w, ]*) \| .+ \|$", re.MULTILINE)


def series(page: str) -> set[tuple[str, str, str]]:
    """Return each series of a metrics page: name, kind, labels."""
    found = set()
    for family in text_string_to_metric_families(page):
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        suffix = "_total" if family.type == "counter" else ""
        found.add((f"{family.name}{suffix}", family.type, ", ".join(sorted(labels))))
    return found


@pytest.mark.asyncio
async def test_the_tables_are_the_pages(tmp_path: Path) -> None:
    """Every series of a cell's three pages is listed with its kind and labels, and nothing else is."""
    folder = make_llama(tmp_path / "tiny", seed=1)
    prepare(str(folder))
    there: set[tuple[str, str, str]] = set()
    async with in_process(open_prepared(str(folder)), flags={"profile_ops": "true"}) as cell:
        for service in ("gateway", "scheduler", "executor-0"):
            url = f"http://{cell.metrics_address(service)}/metrics"
            page = await asyncio.to_thread(lambda url=url: urllib.request.urlopen(url, timeout=10).read().decode())
            there |= series(page)
    assert set(_ROW.findall(PAGE)) == there
