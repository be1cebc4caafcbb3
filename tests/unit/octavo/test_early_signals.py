"""SIGTERM ends a service at every moment of its start."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TIMEOUT = 30.0


def takes_sigterm(pid: int) -> bool:
    """Tell whether a process has a handler of its own for SIGTERM (proc(5): SigCgt)."""
    (caught,) = [
        line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt:")
    ]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("module", ["gateway", "scheduler_svc", "executor_svc"])
def test_sigterm_while_a_service_imports_ends_it_well(module: str) -> None:
    """The handler stands before the imports, so that the first process of a container hears a stop: exit code 0."""
    command = [sys.executable, "-m", module]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            give_up = time.monotonic() + TIMEOUT
            while process.poll() is None and not takes_sigterm(process.pid):
                assert time.monotonic() < give_up, "no handler"
            process.send_signal(signal.SIGTERM)
            printed, _ = process.communicate(timeout=TIMEOUT)
        finally:
            process.kill()
    assert (process.returncode, printed) == (0, b"")
