"""The stages of a start: measured by a service, written to its log, shown by `octavo up`."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_supervisor import Report, fake_plan

from octavo.local import supervisor as supervisor_module
from octavo.local.screen import Screen
from octavo.local.start_log import StageDone, StageProgress, StartLog
from octavo.local.supervisor import StartError, Supervisor
from octavo.rpc import stages as stages_module
from octavo.rpc.stages import Stages
from octavo.rpc.telemetry import JsonFormatter


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Lie."""
        return True


def test_stages_follow_one_another_without_a_gap(caplog: pytest.LogCaptureFixture) -> None:
    """Each begins where the one before ended, the first at the given time; together they are the whole."""
    caplog.set_level(logging.INFO)
    stages = Stages(time.monotonic() - 5.0)
    stages.done("imports")
    stages.done("weights")
    first, second = (record.fields for record in caplog.records)  # type: ignore[attr-defined]
    assert first["stage"] == "imports"
    assert first["seconds"] >= 5.0
    assert second["stage"] == "weights"
    assert second["seconds"] < 5.0
    assert stages.seconds >= first["seconds"] + second["seconds"] - 0.002


def test_progress_is_told_now_and_then(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short stage has no record of it, a long one some, however often it is called."""
    caplog.set_level(logging.INFO)
    stages = Stages()
    for done in range(1000):
        stages.progress("weights", done, 1000)
    told = len(caplog.records)
    assert told < 1000
    monkeypatch.setattr(stages_module, "PROGRESS_INTERVAL", 0.0)
    stages.progress("weights", 7, 1000)
    (record,) = caplog.records[told:]
    assert record.fields == {"stage": "weights", "done": 7, "total": 1000}  # type: ignore[attr-defined]


def test_a_process_knows_when_it_began() -> None:
    """What it did before the first line of ours counts as well."""
    code = "import time; time.sleep(0.3); from octavo.rpc.stages import *; print(time.monotonic() - process_started())"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert 0.3 <= float(done.stdout) < 60


def test_the_log_is_read_as_the_service_writes_it(tmp_path: Path) -> None:
    """Real records become events, half a line waits for its end, anything else is passed over."""
    path = tmp_path / "x.log"
    path.write_text('{"stage": "of an earlier run", "seconds": 9}\n')
    log = StartLog(path)
    assert log.news() == []
    record = logging.LogRecord("x", logging.INFO, "x", 1, "stage of the start over", (), None)
    record.fields = {"stage": "imports", "seconds": 1.25}
    line = JsonFormatter("executor").format(record)
    with path.open("a") as file:
        file.write(f'plain "stage"\n{line}\n{{"stage": "weights", "do')
    assert log.news() == [StageDone("imports", 1.25)]
    with path.open("a") as file:
        file.write('ne": 5, "total": 9}\n{"stage": 1}\n{"message": "no stage"}\n')
    assert log.news() == [StageProgress("weights", 5, 9)]
    assert log.news() == []
    assert StartLog(tmp_path / "none.log").news() == []


@pytest.mark.asyncio
async def test_the_start_shows_stages_before_the_end_they_lead_to(tmp_path: Path) -> None:
    """Each stage in a line with its service and seconds; progress goes to the bar, and the bar ends with its stage."""
    plan = fake_plan(tmp_path, ("serve",) * 3)
    report, bars = Report(), []
    serving = asyncio.Event()

    async def probe(address: str) -> None:
        await serving.wait()

    supervisor = Supervisor(plan, tmp_path, report, probe, progress=lambda *what: bars.append(what))
    starting = asyncio.create_task(supervisor.start())
    await report.until("starting")
    with (tmp_path / "executor-0.log").open("a") as log:
        for fields in ({"seconds": 1.5, "stage": "imports"}, {"stage": "weights", "done": 3, "total": 8}):
            log.write(json.dumps(fields) + "\n")
    await report.until("imports")
    with (tmp_path / "executor-0.log").open("a") as log:
        log.write('{"stage": "weights", "seconds": 2.0}\n')
    serving.set()
    await asyncio.wait_for(starting, 30)
    await supervisor.stop()
    shown = [line.split() for line in report.lines]
    assert ["executor-0", "imports", "1.50", "s"] in shown
    assert shown.index(["executor-0", "weights", "2.00", "s"]) < min(
        index for index, words in enumerate(shown) if "serves" in words
    )
    assert bars == [("executor-0 weights", 3, 8), ("executor-0 weights", 8, 8)]


@pytest.mark.asyncio
async def test_a_long_wait_says_how_far_the_load_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no bar can be drawn, the reminder has the share; a death then ends the start as ever."""
    monkeypatch.setattr(supervisor_module, "REMINDER", 0.3)
    plan = fake_plan(tmp_path, ("serve", "serve", "slow"))
    report = Report()

    async def probe(address: str) -> None:
        await asyncio.Event().wait()

    supervisor = Supervisor(plan, tmp_path, report, probe)
    starting = asyncio.create_task(supervisor.start())
    await report.until("starting")
    (tmp_path / "executor-0.log").write_text('{"stage": "weights", "done": 450, "total": 1000}\n')
    await report.until("executor-0 (weights 45 %)")
    supervisor.kill()
    with pytest.raises(StartError):
        await asyncio.wait_for(starting, 30)
    await supervisor.stop()


def test_lines_and_bars_do_not_run_into_one_another() -> None:
    """A bar appears on a terminal, goes with the last byte, and lines stand alone; elsewhere there are no bars."""
    out, bars = io.StringIO(), Terminal()
    screen = Screen(out, bars)
    screen.progress("executor-0 weights", 512, 1024)
    assert "executor-0 weights:  50%" in bars.getvalue()
    screen.line("a line")
    assert out.getvalue() == "a line\n"
    screen.progress("executor-0 weights", 1024, 1024)
    assert bars.getvalue().rstrip(" ").endswith("\r")
    plain = io.StringIO()
    Screen(out, plain).progress("executor-0 weights", 1, 2)
    assert plain.getvalue() == ""
