"""One service's process: started on a leash, its output in a file, stopped with a grace."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from octavo.local import leash as leash_program
from octavo.local.log_lines import last_lines
from octavo.local.plan import ServicePlan

_SHOWN_LINES = 12
_LEASH = leash_program.__file__


class Child:
    """A service's process, and after a death its successor. Output goes to `log`, appended."""

    def __init__(self, plan: ServicePlan, log: Path, environ: Mapping[str, str] | None = None) -> None:
        """`environ`: its environment, its successors' too; None: this process's."""
        self.plan = plan
        self._environ = environ
        self.log = log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def name(self) -> str:
        """The service's name."""
        return self.plan.name

    @property
    def pid(self) -> int | None:
        """Id of the process that runs, or ran last."""
        return None if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process that ran last, negative for a signal; None while it runs or before it did."""
        return None if self._process is None else self._process.returncode

    async def start(self) -> None:
        """Start the process. Raises OSError."""
        # By its path, and without site-packages, which it does not need: a Python that starts in half the time.
        leash = (sys.executable, "-I", "-S", _LEASH, str(os.getpid()))
        with self.log.open("ab") as log:
            # A session of its own: Ctrl-C in the terminal reaches the supervisor alone, which stops services in order.
            self._process = await asyncio.create_subprocess_exec(
                *leash,
                *self.plan.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environ,
                start_new_session=True,
            )

    async def wait(self) -> int:
        """Return the exit code once the process has ended."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, grace: float) -> bool:
        """Send SIGTERM, after `grace` seconds SIGKILL, and wait. Returns whether it ended within the grace."""
        if self._process is None or self._process.returncode is not None:
            return True
        self._send(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), grace)
        except TimeoutError:
            self.kill()
            await self._process.wait()
            return False
        return True

    def kill(self) -> None:
        """Send SIGKILL, where it still runs."""
        self._send(signal.SIGKILL)

    def last_words(self) -> str:
        """Return how it ended and the end of its log, for people."""
        code = self.exit_code
        how = (
            f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"
        )
        lines = last_lines(self.log, _SHOWN_LINES)
        return "\n".join([f"{self.name} {how}; its log ({self.log}) ends:", *(f"    {line}" for line in lines)])

    def _send(self, signum: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signum)
