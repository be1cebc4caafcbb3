"""An executor that starts its other rank itself, as processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from factories import make_llama, prepared_from

SLOW_START = 240.0
"""Seconds for processes that import torch on a machine with other work."""


def _start(folder: Path, log: Path) -> subprocess.Popen[bytes]:
    flags = ["--tensor-parallel", "2", "--port", "0", "--metrics-port", "0", "--kv-memory", "4MiB"]
    command = [sys.executable, "-m", "executor_svc", "--model", str(folder), "--dtype", "float32", *flags]
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file)


def _wait_for(text: str, log: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + SLOW_START
    while text not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


@pytest.mark.timeout(600)
def test_a_rank_that_is_killed_ends_the_executor(tmp_path: Path) -> None:
    """Two ranks serve; one is killed while there is nothing to do, and the other ends by itself with the reason in its
    log.
    """
    model = prepared_from(make_llama(tmp_path / "tiny"))
    log = tmp_path / "log"
    process = _start(model.path, log)
    _wait_for("executor serving", log, process)
    (other,) = psutil.Process(process.pid).children()
    other.send_signal(signal.SIGINT)
    other.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert process.poll() is None, "signals to stop are rank 0's to take"
    other.kill()
    assert process.wait(SLOW_START) == 1
    assert '"reason": "rank 1 is gone' in log.read_text()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_heads_that_do_not_divide_end_the_start(tmp_path: Path) -> None:
    """With the numbers in the log, and no rank left."""
    model = prepared_from(make_llama(tmp_path / "tiny", hidden_size=72, num_heads=9, num_kv_heads=1))
    log = tmp_path / "log"
    process = _start(model.path, log)
    assert process.wait(SLOW_START) != 0
    assert "--tensor-parallel 2: the 9 attention heads, 1 KV heads" in log.read_text()
    deadline = time.monotonic() + SLOW_START
    while any(str(model.path) in " ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < deadline
        time.sleep(0.1)
