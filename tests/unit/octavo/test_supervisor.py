"""The supervisor: starting, restarting and stopping the processes of a cell. Processes are real, services fakes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from ports import take_ports

from octavo.local import supervisor as supervisor_module
from octavo.local.child import Child
from octavo.local.log_lines import last_lines, readable
from octavo.local.plan import CellPlan, ServicePlan
from octavo.local.probe import wait_until_serving
from octavo.local.session import run_cell
from octavo.local.supervisor import StartError, Supervisor

FAKE = Path(__file__).with_name("fake_service.py")
NAMES = ("gateway", "scheduler", "executor-0", "executor-1")
TIMEOUT = 30.0


def fake_plan(folder: Path, modes: Sequence[str] = ("serve",) * 4) -> CellPlan:
    """Return a cell of fakes that note what happens in `folder`/events."""
    return CellPlan(
        tuple(
            ServicePlan(
                name,
                (sys.executable, str(FAKE), name, str(port), str(folder / "events"), mode),
                f"127.0.0.1:{port}",
                "127.0.0.1:1",
            )
            for name, port, mode in zip(NAMES, take_ports(len(modes)), modes, strict=False)
        ),
        "127.0.0.1:1",
        "127.0.0.1:1",
    )


def events_of(folder: Path) -> list[str]:
    """Return what the fakes noted."""
    return (folder / "events").read_text().splitlines()


class Report:
    """Collects the supervisor's lines; a test can wait for one."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._changed = asyncio.Event()

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        self._changed.set()

    async def until(self, text: str, count: int = 1) -> None:
        """Return once `count` lines hold `text`."""
        async with asyncio.timeout(TIMEOUT):
            while sum(text in line for line in self.lines) < count:
                self._changed.clear()
                await self._changed.wait()


def make(folder: Path, report: Report, plan: CellPlan, **options: float) -> Supervisor:
    """Return a supervisor that asks for health as `octavo up` does."""
    return Supervisor(plan, folder, report, wait_until_serving, **options)


@pytest.mark.asyncio
async def test_all_serve_after_start_and_stop_goes_gateway_scheduler_executors(tmp_path: Path) -> None:
    """Start returns when every service serves and names each; stop ends one rank before it asks the next."""
    report = Report()
    supervisor = make(tmp_path, report, fake_plan(tmp_path))
    await asyncio.wait_for(supervisor.start(), TIMEOUT)
    for name in NAMES:
        assert any(line.startswith(f"{name} serves after") for line in report.lines)
    await supervisor.stop()
    noted = events_of(tmp_path)
    assert sorted(noted[:4]) == sorted(f"{name} starts" for name in NAMES)
    assert noted[4:8] == ["gateway stops", "gateway ended", "scheduler stops", "scheduler ended"]
    assert sorted(noted[8:]) == ["executor-0 ended", "executor-0 stops", "executor-1 ended", "executor-1 stops"]


@pytest.mark.asyncio
async def test_a_service_that_dies_at_the_start_ends_it_with_its_last_words(tmp_path: Path) -> None:
    """The error holds name, exit code, log file and the log's end in plain text; the others are stopped."""
    plan = fake_plan(tmp_path, ("serve", "serve", "die"))
    with pytest.raises(StartError) as raised:
        await run_cell(plan, tmp_path, Report(), asyncio.Event().wait)  # type: ignore[arg-type]
    message = str(raised.value)
    assert "executor-0 ended with code 3" in message
    assert str(tmp_path / "executor-0.log") in message
    assert "10:20:30.456 error no weights path=w.gguf" in message
    assert not [child for child in psutil.Process().children() if str(FAKE) in child.cmdline()]


@pytest.mark.asyncio
async def test_a_system_that_has_nothing_left_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What killed a service, such as memory that ran out, may refuse its successor too: the cell goes on meanwhile, and
    the service comes back. A report that cannot be made ends the run with its own error.
    """
    monkeypatch.setattr(supervisor_module, "FIRST_PAUSE", 0.01)
    report = Report()
    supervisor = make(tmp_path, report, fake_plan(tmp_path))
    await asyncio.wait_for(supervisor.start(), TIMEOUT)
    running = asyncio.create_task(supervisor.run())
    before = supervisor.pids()
    refusals = iter(["Cannot allocate memory", "Too many open files"])
    start = Child.start

    async def start_at_last(child: Child) -> None:
        if (why := next(refusals, None)) is not None:
            raise OSError(12, why)
        await start(child)

    monkeypatch.setattr(Child, "start", start_at_last)
    os.kill(before["executor-0"], signal.SIGKILL)
    await report.until("executor-0 is back")
    assert [line for line in report.lines if "could not be started" in line] == [
        "executor-0 could not be started: Cannot allocate memory",
        "executor-0 could not be started: Too many open files",
    ]
    after = supervisor.pids()
    assert [name for name in NAMES if before[name] != after[name]] == ["executor-0"]

    def closed(line: str) -> None:
        raise BrokenPipeError(line)

    monkeypatch.setattr(supervisor, "_report", closed)
    os.kill(after["executor-1"], signal.SIGKILL)
    with pytest.raises(BrokenPipeError):
        await asyncio.wait_for(running, TIMEOUT)
    monkeypatch.setattr(supervisor, "_report", report)
    await supervisor.stop()


@pytest.mark.asyncio
async def test_a_dead_service_is_started_again_and_the_others_stay(tmp_path: Path) -> None:
    """A kill is reported, the service comes back as a new process; the second quick death waits twice as long."""
    report = Report()
    supervisor = make(tmp_path, report, fake_plan(tmp_path))
    await asyncio.wait_for(supervisor.start(), TIMEOUT)
    running = asyncio.create_task(supervisor.run())
    before = supervisor.pids()
    os.kill(before["executor-0"], signal.SIGKILL)
    await report.until("executor-0 is back")
    assert any("executor-0 was ended by SIGKILL" in line for line in report.lines)
    after = supervisor.pids()
    assert after.pop("executor-0") != before.pop("executor-0")
    assert after == before
    os.kill(supervisor.pids()["executor-0"], signal.SIGKILL)
    await report.until("executor-0 is back", 2)
    pauses = [line for line in report.lines if line.startswith("starting executor-0 again")]
    first = supervisor_module.FIRST_PAUSE
    assert pauses == [f"starting executor-0 again in {pause:g} s" for pause in (first, 2 * first)]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await supervisor.stop()


@pytest.mark.asyncio
async def test_a_service_that_does_not_end_is_killed_after_the_grace_and_named(tmp_path: Path) -> None:
    """SIGTERM first, SIGKILL after the grace, and a line that says so; the ranks behind it still stop."""
    report = Report()
    supervisor = make(tmp_path, report, fake_plan(tmp_path, ("stubborn", "serve", "serve")), stop_grace=0.3)
    await asyncio.wait_for(supervisor.start(), TIMEOUT)
    await supervisor.stop()
    assert "gateway ignores" in events_of(tmp_path)
    assert any(line.startswith("gateway did not end within") for line in report.lines)
    assert events_of(tmp_path)[-2:] == ["executor-0 stops", "executor-0 ended"]


@pytest.mark.asyncio
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_ends_the_use_and_stops_the_cell_in_order(tmp_path: Path, signum: signal.Signals) -> None:
    """Whatever is going on is cancelled, the services stop in order, and the caller learns that a signal came."""
    in_use = asyncio.Event()

    async def use() -> None:
        in_use.set()
        await asyncio.Event().wait()

    running = asyncio.create_task(run_cell(fake_plan(tmp_path, ("serve",) * 3), tmp_path, Report(), use))
    await asyncio.wait_for(in_use.wait(), TIMEOUT)
    os.kill(os.getpid(), signum)
    assert await asyncio.wait_for(running, TIMEOUT) is False
    assert [line for line in events_of(tmp_path) if line.endswith("ended")] == [f"{name} ended" for name in NAMES[:3]]


@pytest.mark.asyncio
async def test_a_signal_during_the_start_stops_what_has_started(tmp_path: Path) -> None:
    """Ctrl-C while a model still loads ends at once: nothing waits for health."""
    report = Report()
    plan = fake_plan(tmp_path, ("serve", "serve", "slow"))
    running = asyncio.create_task(run_cell(plan, tmp_path, report, asyncio.Event().wait))  # type: ignore[arg-type]
    await report.until("gateway serves")
    os.kill(os.getpid(), signal.SIGINT)
    assert await asyncio.wait_for(running, TIMEOUT) is False
    assert not [child for child in psutil.Process().children() if str(FAKE) in child.cmdline()]


@pytest.mark.asyncio
async def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    """A service that hangs holds nobody up who asks twice."""
    report = Report()
    plan = fake_plan(tmp_path, ("stubborn", "serve", "serve"))

    async def use() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    running = asyncio.create_task(run_cell(plan, tmp_path, report, use))
    await report.until("stopping")
    os.kill(os.getpid(), signal.SIGTERM)
    # Far below the grace of a single signal.
    assert await asyncio.wait_for(running, supervisor_module.STOP_GRACE / 2) is False


@pytest.mark.asyncio
async def test_use_that_ends_or_fails_stops_the_cell(tmp_path: Path) -> None:
    """The cell lives as long as its use: a result gives True, an error comes through, and nothing is left running."""
    plan = fake_plan(tmp_path, ("serve",) * 3)

    async def succeed() -> None:
        pass

    async def fail() -> None:
        raise LookupError("nothing there")

    assert await run_cell(plan, tmp_path, Report(), succeed) is True
    with pytest.raises(LookupError):
        await run_cell(plan, tmp_path, Report(), fail)
    assert not [child for child in psutil.Process().children() if str(FAKE) in child.cmdline()]


def test_services_end_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    """SIGKILL stops no one in order, but leaves no one behind either."""
    code = f"""
import asyncio, sys
sys.path = {sys.path!r}
from pathlib import Path
from test_supervisor import Report, fake_plan, make
async def main():
    supervisor = make(Path({str(tmp_path)!r}), Report(), fake_plan(Path({str(tmp_path)!r})))
    await supervisor.start()
    print("ready", flush=True)
    await supervisor.run()
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            services = psutil.Process(process.pid).children()
            assert len(services) == len(NAMES)
        finally:
            process.kill()
    _, alive = psutil.wait_procs(services, timeout=TIMEOUT)
    assert not alive
    assert sum(line.endswith("ended") for line in events_of(tmp_path)) == len(NAMES)


def test_log_records_are_shown_as_text_and_anything_else_as_it_is(tmp_path: Path) -> None:
    """JSON records become time, level, message, fields and exception; a traceback or a half line stays."""
    assert readable('{"time": "2026-01-01T10:20:30.456+00:00", "level": "info", "message": "up", "port": 5}') == (
        "10:20:30.456 info up port=5"
    )
    assert readable('{"message": "bad", "exception": "Traceback\\n  ValueError"}') == "bad\nTraceback\n  ValueError"
    for text in ("plain", '{"half": ', "[1]", '{"no": "record"}', ""):
        assert readable(text) == text
    (tmp_path / "x.log").write_bytes(b"one\ntwo\nthree \xff\n")
    assert last_lines(tmp_path / "x.log", 2) == ["two", "three \N{REPLACEMENT CHARACTER}"]
    assert last_lines(tmp_path / "none.log", 2) == []
