"""The table, the JSON file, the picture and the progress line."""

from __future__ import annotations

import asyncio
import io
import json
import struct
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from fake_target import FakeTarget, Script
from test_bench_figures import record_of, result_of
from test_bench_session import run, settings_of

from octavo.bench.document import SCHEMA, document
from octavo.bench.figures import figures_of
from octavo.bench.plots import draw
from octavo.bench.progress import progress_line, shown_progress
from octavo.bench.records import CANCELLED, OK, Record, RequestFailed
from octavo.bench.report import notes_on, report
from octavo.bench.runner import Counters, Runner
from octavo.bench.session import Outcome

FULL = RequestFailed("RESOURCE_EXHAUSTED", "the queue is full")


def outcome_of(
    *records: Record, is_open_loop: bool = False, cpu_seconds: float = 0.0, was_stopped: bool = False
) -> Outcome:
    """An outcome with these records, on an idle machine."""
    result = replace(result_of(*records, is_open_loop=is_open_loop, cpu_seconds=cpu_seconds), was_stopped=was_stopped)
    return Outcome(FakeTarget().info, settings_of(), result, figures_of(result, {"ttft": 0.5}), 64, (0.0, 0.0))


def measured() -> Outcome:
    """A run of four requests, of which one failed."""
    outcome, _ = run(FakeTarget(scripts={2: Script(failure=FULL)}), settings_of(objectives={"ttft": 0.6, "itl": 0.2}))
    assert outcome is not None
    return replace(outcome, load_average=(0.0, 0.0))


def test_the_table_says_what_was_measured() -> None:
    """Every line of a run whose figures are known: 0.5 s to the first token, then 0.1 s a token."""
    lines = report(measured()).splitlines()
    assert lines[:3] == [
        "model, revision revision, completions over fake at here",
        "closed loop, 2 at once; 4 requests, 0 before to warm up",
        "input 20 tokens, output 3 (end of sequence ignored), temperature 0, seed 0",
    ]
    table = {line[:22].strip(): line[22:].split() for line in lines[4:9]}
    assert table["milliseconds"] == ["mean", "p50", "p90", "p99", "max"]
    assert table["time to first token"] == ["500.0"] * 5
    assert table["inter-token latency"] == ["100.0"] * 5
    assert table["time per output token"] == ["100.0"] * 5
    assert table["end to end"] == ["700.0"] * 5
    totals = {line[:24].strip(): line[24:] for line in lines[10:17]}
    assert totals["requests"] == "3 ok, 1 failed; 1 RESOURCE_EXHAUSTED"
    assert totals["duration"] == "1.40 s, 2.0 requests in flight on average"
    assert totals["throughput"] == "2.14 requests/s"
    assert totals["output tokens"] == "9, 6.4 a second"
    assert totals["input and output"] == "69 tokens, 49.3 a second"
    assert totals["goodput"] == "2.14 requests/s, 75.0% within ttft 600.0 ms, itl 200.0 ms"
    assert totals["generator"].endswith("% of a core")


def test_a_figure_without_a_sample_is_a_dash() -> None:
    """A run of nothing but failures shows no zeros where there is no time."""
    lines = report(outcome_of(record_of([], status="UNAVAILABLE", ended=101.0))).splitlines()
    row = next(line for line in lines if line.startswith("time to first token"))
    assert row.split()[4:] == ["-"] * 5


def test_a_quiet_run_has_no_notes() -> None:
    """Notes are for what makes figures doubtful; there is none here."""
    assert notes_on(outcome_of(record_of([101.0, 101.1, 101.2]), is_open_loop=True)) == []


def test_the_head_of_a_stopped_run_says_how_many_requests_were_sent_of_how_many() -> None:
    """What was sent alone would look like what was asked for."""
    records = [record_of([101.0]), record_of([], status=CANCELLED)]
    assert "; 2 of 64 requests, " in report(outcome_of(*records, was_stopped=True)).splitlines()[1]
    assert "; 2 requests, " in report(outcome_of(*records)).splitlines()[1]


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (
            outcome_of(record_of([101.0]), record_of([], status=CANCELLED), was_stopped=True),
            "stopped early, with 1 ended and 1 live: the figures are of the former, the latter were cancelled",
        ),
        (outcome_of(record_of([101.0], sent=100.5), is_open_loop=True), "fell behind its own schedule: p99 500.0 ms"),
        (outcome_of(record_of([101.0]), cpu_seconds=0.9), "used 90% of a core"),
        (outcome_of(record_of([101.0], is_counted_by_server=False)), "no usage from the server for 1 of 1 requests"),
        (outcome_of(record_of([101.0], prompt_tokens=None)), "no count of input tokens for 1 of 1 requests"),
        (outcome_of(record_of([101.0, 102.0], delta_tokens=[1, 3])), "tokens came 2.00 at a time"),
        (outcome_of(record_of([101.0], asked_tokens=5)), "1 of 1 requests got fewer tokens than they asked for"),
        (
            replace(outcome_of(record_of([101.0])), load_average=(5000.0, 0.0)),
            "this machine was busy before the run: a load average of 5000.0",
        ),
    ],
)
def test_what_makes_figures_doubtful_is_noted(outcome: Outcome, words: str) -> None:
    """Each condition has a sentence, in the table and in the JSON."""
    assert any(words in note for note in notes_on(outcome))
    assert f"note: {next(note for note in notes_on(outcome) if words in note)}" in report(outcome)


def test_the_json_holds_the_whole_run() -> None:
    """It goes through JSON; every request is there with its times from the start; no key is."""
    started_at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    whole = json.loads(json.dumps(document(measured(), started_at), allow_nan=False))
    assert (whole["schema"], whole["started_at"]) == (SCHEMA, "2026-01-02T03:04:05+00:00")
    assert whole["settings"]["input_tokens"] == "20"
    assert whole["settings"]["options"]["ignore_eos"] is True
    assert whole["figures"]["ttft"]["p99"] == pytest.approx(0.5)
    assert whole["figures"]["errors"] == {"RESOURCE_EXHAUSTED": 1}
    assert whole["environment"]["cpus"] >= 1
    assert whole["environment"]["versions"]["octavo"]
    assert [each["status"] for each in whole["requests"]] == [OK, OK, "RESOURCE_EXHAUSTED", OK]
    third = whole["requests"][2]
    assert third["message"] == "the queue is full"
    assert (third["scheduled"], third["ttft"], third["e2e"]) == (0.7, 0.5, 0.7)
    assert third["gaps"] == [0.1, 0.1]
    assert (third["delta_tokens"], third["output_tokens"], third["asked_tokens"]) == ([1, 1, 1], 3, 3)
    assert "key" not in json.dumps(whole)


@pytest.mark.parametrize(
    "outcome",
    [
        measured(),
        outcome_of(),
        outcome_of(
            record_of([100.001 + 0.001 * index for index in range(50)] + [103.0]),
            record_of([100.5, 101.0], output_tokens=9),
            record_of([], status=CANCELLED, ended=101.0),
        ),
    ],
    ids=["failures", "nothing", "tail"],
)
def test_a_picture_is_drawn_of_any_run(outcome: Outcome, tmp_path: Path) -> None:
    """A PNG of the announced size, also of runs without a single token, and without a warning."""
    draw(outcome, tmp_path / "run.png")
    content = (tmp_path / "run.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", content[16:24]) == (1440, 960)


def test_the_progress_line_counts() -> None:
    """A bar, ended of all, live, failed, tokens a second, seconds."""
    line = progress_line(Counters(total=48, live=3, ok=10, failed=2, output_tokens=640), 4.0)
    assert line == "[######..................] 12/48 requests, 3 live, 2 failed, 160 tokens/s, 4 s"
    assert "failed" not in progress_line(Counters(total=1), 0.0)


@pytest.mark.asyncio
async def test_progress_is_for_terminals() -> None:
    """Nothing is written to a file or pipe; a terminal's line is gone at the end."""

    class Terminal(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.written = asyncio.Event()

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            self.written.set()
            return super().write(text)

    runner = Runner(FakeTarget(), asyncio.get_running_loop().time)
    pipe, terminal = io.StringIO(), Terminal()
    async with shown_progress(runner, "running", pipe), shown_progress(runner, "running", terminal):
        async with asyncio.timeout(30):
            await terminal.written.wait()
    assert pipe.getvalue() == ""
    assert "running [....." in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")
