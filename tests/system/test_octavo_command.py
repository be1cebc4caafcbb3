"""`octavo demo` and `octavo up` as a person runs them: real processes, a tiny model."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ports import take_ports

from octavo.local.hints import python_program
from octavo.models.prepared import PreparedModel

TIMEOUT = 100.0
PORTS = ("gateway", "scheduler", "executor", "http", "admin", "metrics")
STAGES = (
    *(("executor-0", stage) for stage in ("imports", "weights", "warm-up", "listening")),
    *(("gateway", stage) for stage in ("imports", "tokenizer", "listening")),
    *(("scheduler", stage) for stage in ("imports", "listening")),
)
SERIES = (
    ("gateway", "octavo_requests_accepted_total"),
    ("scheduler", "octavo_scheduler_requests_accepted_total"),
    ("executor-0", "octavo_executor_steps_total"),
)
SMALL = ("--kv-memory", "16MiB", "--threads", "1", "--dtype", "float32")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """The environment of a user with a home of its own."""
    return os.environ | {"OCTAVO_HOME": str(tmp_path)}


def processes_of(home: Path) -> list[psutil.Process]:
    """Return every process that was started with this home."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("OCTAVO_HOME") == str(home):
                found.append(process)
    return found


class Up:
    """An `octavo up` that runs; `printed` is what it has said so far."""

    def __init__(self, model: PreparedModel, environ: dict[str, str]) -> None:
        # Scheduler and executor have their pages of metrics at the two ports behind the gateway's.
        ports = zip(PORTS, take_ports(len(PORTS) + 2), strict=False)
        flags = [text for name, port in ports for text in (f"--{name}-port", str(port))]
        command = [sys.executable, "-m", "octavo", "up", str(model.path), *flags, *SMALL]
        self.process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
        self.printed = ""

    def until(self, pattern: str) -> re.Match[str]:
        """Read on to the line that matches. Fails when the output ends before that; pytest's timeout bounds it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed += line
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"ended without {pattern!r}: {self.printed}")


@pytest.fixture
def up(tiny_model: PreparedModel, environ: dict[str, str]) -> Iterator[Up]:
    """`octavo up` with the tiny model; killed if the test left it running."""
    running = Up(tiny_model, environ)
    yield running
    running.process.kill()
    running.process.wait()
    assert running.process.stdout is not None
    running.process.stdout.close()


def run_program(address: str) -> None:
    """Run the program that `octavo up` prints, once the gateway says that it serves. Fails where the program does."""
    wait = "import asyncio; from octavo.local.probe import wait_until_serving\n"
    wait += f"asyncio.run(wait_until_serving({address!r}))\n"
    command = [sys.executable, "-c", wait + python_program(address)]
    subprocess.run(command, check=True, timeout=TIMEOUT, stdout=subprocess.DEVNULL)


def test_the_demo_shows_an_answer_and_leaves_nothing_running(
    tiny_model: PreparedModel, environ: dict[str, str], tmp_path: Path
) -> None:
    """One command from model to answer, exit code 0, a log file per service, and no process left."""
    command = [sys.executable, "-m", "octavo", "demo", str(tiny_model.path), "--question", "the end", *SMALL]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^you    the end\nmodel  ", done.stdout, re.MULTILINE)
    assert re.search(
        r"^\d+ prompt tokens, \d+ tokens written, ended by (the model itself|[^\n]+)$", done.stdout, re.MULTILINE
    )
    assert re.search(r"^time to first token \d+ ms, then \d+\.\d tokens/s$", done.stdout, re.MULTILINE)
    (logs,) = (tmp_path / "logs").iterdir()
    assert sorted(path.name for path in logs.iterdir()) == ["executor-0.log", "gateway.log", "scheduler.log"]
    assert not processes_of(tmp_path)


def test_up_serves_what_it_prints_survives_a_killed_executor_and_stops_at_sigterm(up: Up, tmp_path: Path) -> None:
    """Stages and metrics pages are shown, and the pages are there. The printed program gets its answer, before and
    after SIGKILL of the executor; SIGTERM ends all, exit code 0.
    """
    address = up.until(r"is served at (\S+) ")[1]
    for name, stage in STAGES:
        assert re.search(rf"^  {name} +{stage} +\d+\.\d\d s$", up.printed, re.MULTILINE), (name, stage)
    up.until("^logs: ")
    pages = re.findall(r"^  (\S+) +(http://127\.0\.0\.1:\d+/metrics)$", up.printed, re.MULTILINE)
    assert [name for name, _ in pages] == [name for name, _ in SERIES]
    for (_, page), (_, series) in zip(pages, SERIES, strict=True):
        with urllib.request.urlopen(page, timeout=TIMEOUT) as response:
            assert series in response.read().decode(), page
    assert python_program(address) in up.printed
    run_program(address)
    (executor,) = [child for child in processes_of(tmp_path) if "executor_svc" in child.cmdline()]
    executor.kill()
    up.until("executor-0 was ended by SIGKILL")
    up.until("executor-0 is back")
    run_program(address)
    up.process.terminate()
    assert up.process.wait(TIMEOUT) == 0
    assert not processes_of(tmp_path)
