"""Rank 0's start of the other ranks on its machine, and their end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from executor_svc.parallel.place import Place
from octavo.local import leash
from octavo.rpc.settings import fields_of
from octavo.settings import ExecutorSettings

END_GRACE = 5.0
"""Seconds for the other ranks to end once they were told to."""


class StartedRanks:
    """The processes of the other ranks. They end with this one, however it ends (Linux)."""

    def __init__(self, processes: Mapping[int, subprocess.Popen[bytes]]) -> None:
        """`processes`: by rank."""
        self._processes = processes

    def dead(self) -> dict[int, int]:
        """Return the exit codes of those that have ended, by rank."""
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def wait(self, grace: float = END_GRACE) -> None:
        """Wait for all to end; kill those that do not within the grace, in seconds."""
        for process in self._processes.values():
            try:
                process.wait(grace)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def start_ranks(settings: ExecutorSettings, place: Place) -> StartedRanks | None:
    """Start the ranks that are this one's to start; None where torchrun starts them all. Raises OSError.

    Called on the main thread, whose end they follow.
    """
    if place.listener is None:
        return None
    # As octavo up starts services: tied to this process by the kernel.
    tied = (sys.executable, "-I", "-S", leash.__file__, str(os.getpid()))
    command = (*tied, sys.executable, "-m", "executor_svc", *flags_of(settings))
    processes = {
        rank: subprocess.Popen(command, stdin=subprocess.DEVNULL, env={**os.environ, **place.variables(rank)})
        for rank in range(1, place.share.size)
    }
    return StartedRanks(processes)


def flags_of(settings: ExecutorSettings) -> Sequence[str]:
    """Return the flags that give these settings again."""
    flags = []
    for field in fields_of(type(settings)):
        value = getattr(settings, field.name)
        if value is not None:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            flags.append(f"--{field.name.replace('_', '-')}={text}")
    return flags
