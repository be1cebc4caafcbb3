"""A service of Octavo, or a script, as a process of its own: started, waited for, its CPU time read, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.home import VARIABLE as HOME

_START_SECONDS = 120.0
PORT_FLAGS = {
    "gateway": ("port", "http-port", "admin-port", "metrics-port"),
    "scheduler_svc": ("port", "metrics-port"),
    "executor_svc": ("port", "metrics-port"),
}
_READY = {"gateway": "listening", "scheduler_svc": "scheduler listening", "executor_svc": "executor serving"}


class ServiceProcess:
    """A running process. `line`: what its log said when it was ready."""

    def __init__(self, process: asyncio.subprocess.Process, line: Mapping[str, Any]) -> None:
        self.process = process
        self.line = line

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.line['port']}"

    def cpu_seconds(self) -> float:
        """Return the CPU time of all its threads so far, by the kernel's own clock in nanoseconds."""
        total = 0
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has ended meanwhile
                total += int((task / "schedstat").read_text().split()[0])
        return total / 1e9


@contextlib.asynccontextmanager
async def script_process(argv: Sequence[str], ready: str) -> AsyncIterator[ServiceProcess]:
    """Run Python with these arguments until the context is left. It is ready once it logs the message `ready`.

    What it logs on stderr behind that is read and dropped. Raises SystemExit where it does not get ready.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_") or name == HOME}
    process = await asyncio.create_subprocess_exec(sys.executable, *argv, stderr=asyncio.subprocess.PIPE, env=environ)
    assert process.stderr is not None
    reading: asyncio.Task[None] | None = None
    try:
        async with asyncio.timeout(_START_SECONDS):
            line: dict[str, Any] = {}
            while line.get("message") != ready:
                text = await process.stderr.readline()
                if not text:
                    raise SystemExit(f"{' '.join(argv[:2])} did not start")
                with contextlib.suppress(ValueError):
                    line = json.loads(text)
        # Its log is read on, or it would wait for somebody to do so.
        reading = asyncio.create_task(_drain(process.stderr))
        yield ServiceProcess(process, line)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        if reading is not None:
            await reading


@contextlib.asynccontextmanager
async def service_process(module: str, flags: Mapping[str, str]) -> AsyncIterator[ServiceProcess]:
    """Run a service with these flags, on free ports, until the context is left."""
    given = dict.fromkeys(PORT_FLAGS[module], "0") | dict(flags)
    argv = [text for name, value in given.items() for text in (f"--{name}", value)]
    async with script_process(["-m", module, *argv], _READY[module]) as process:
        yield process


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.read(1 << 16):
        pass
