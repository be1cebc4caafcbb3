"""The tables of docs/performance.md are made of files of figures."""

from __future__ import annotations

from typing import Any

import pytest
from bench_scripts import load_script

page, ratios = load_script("performance_page"), load_script("ratios")

MACHINE = {"cpu": "A CPU", "instructions": ["avx2", "f16c"], "cpus": 2, "memory_gib": 23.4}


def test_a_file_of_serve_becomes_a_table() -> None:
    """A row for each workload, the machine by its name and limits, notes below."""
    row = {
        "total_s": 4.0,
        "output_tokens_per_s": 1508.75,
        "ttft_ms": {"mean": 812.0},
        "tpot_ms": {"mean": 21.04},
        "itl_ms": {"p50": 20.0, "p99": 55.55},
        "peak_rss_mib": 1900.0,
        "over_floor": 1.256,
    }
    figures: dict[str, Any] = {
        "model": "tiny",
        "dtype": "bfloat16",
        "served": {"threads": 2},
        "start_seconds": 3.21,
        "machine": MACHINE,
        "limits": {"read_bandwidth": 24e9, "peak_rate": 1.87e12, "peak_type": "bfloat16"},
        "workloads": {"W2": row},
        "notes": ["this machine was busy"],
    }
    text = page.serve_table(figures)
    assert "| W2 | 4.00 | 1509 | 812 | 21.0 | 20.0, 55.5 | 1900 | 1.26 |" in text
    assert "A CPU (avx2, f16c), 2 CPUs, 23.4 GiB, 24.0 GB/s read, 1.87 T/s" in text
    assert text.endswith("\n\n- this machine was busy")


def test_files_of_peers_become_a_table_for_each_model() -> None:
    """The hardest peer stands first; what was measured again counts; who was not measured is named with the reason."""
    about = {"label": "slow one", "versions": "slow 1", "load_s": 3.0}
    slow = ratios.compare("W2", [({"total_s": 2.0}, {"total_s": 5.0})]) | about
    fast = ratios.compare("W2", [({"total_s": 0.5}, {"total_s": 0.25})]) | about | {"label": "fast one"}
    document: dict[str, Any] = {
        "machine": MACHINE,
        "notes": [],
        "models": {
            "tiny": {
                "octavo": {"dtype": "float32"},
                "workloads": {"W2": {"slow": slow, "fast": fast}},
                "over_floor": {"W2": {"over_floor": 1.5}},
                "unavailable": {"other": "no such | instruction"},
            }
        },
    }
    before: dict[str, Any] = {
        **document,
        "notes": ["this machine was busy"],
        "models": {
            "tiny": {
                "octavo": {"dtype": "float32"},
                "workloads": {"W3": {"slow": slow}, "W2": {"fast": slow}},
                "over_floor": {"W2": {"over_floor": 1.62}, "W3": {"over_floor": 2.0}},
                "unavailable": {"slow": "it was not there yet"},
            }
        },
    }
    lines = page.peers_table(page.joined([before, document])).splitlines()
    rows = [line for line in lines if line.startswith("| W2")]
    assert rows == [
        "| W2 | fast one | 0.50 | total 250.0 ms / 500.0 ms | 1 | 3 | slow 1 |",
        "| W2 | slow one | 2.50 | total 5.00 s / 2.00 s | 1 | 3 | slow 1 |",
    ]
    assert sum(line.startswith("| W3") for line in lines) == 1
    assert "Octavo over its floor in these runs: W2 1.50 to 1.62, W3 2.00." in lines
    assert lines[-2:] == ["- other was not measured: no such / instruction", "- this machine was busy"]


def test_tables_replace_what_is_between_the_marks_and_nothing_else() -> None:
    """The page as committed has the marks; filling it twice gives what filling it once gives."""
    text = page.PAGE.read_text(encoding="utf-8")
    once = page.filled(text, ["a table", "another"])
    assert page.filled(once, ["a table", "another"]) == once
    before, after = once.split(page.BEGIN)[0], once.split(page.END)[1]
    assert (before, after) == (text.split(page.BEGIN)[0], text.split(page.END)[1])
    assert "a table\n\nanother" in once
    with pytest.raises(ValueError, match="lacks"):
        page.filled("a page", [])
