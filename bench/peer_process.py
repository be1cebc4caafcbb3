"""A peer's runner as a process: started in the peer's own environment, asked over its pipes, stopped.

peers/protocol.py says what goes over the pipes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import load
from workloads import Workload

from octavo.bench.target import Target

ENVIRONMENTS = Path(__file__).parents[1] / ".bench"
_RUNNERS = Path(__file__).with_name("peers")
_LINE_BYTES = 16 << 20
_STOP_SECONDS = 60.0
_LAST_LINES = 12


class PeerError(Exception):
    """A peer that cannot be measured, or not this time; the message says why."""


@dataclass(frozen=True)
class Peer:
    """An engine to compare with: its runner, the mode of it, its environment, and the workloads it can run."""

    name: str
    runner: str
    environment: str
    mode: str = ""
    workloads: tuple[str, ...] = ("W1", "W2", "W3")

    def command(self, model: Path, num_threads: int) -> list[str]:
        """Return the command of the runner. Raises PeerError where the environment has not been made."""
        python = ENVIRONMENTS / self.environment / "bin" / "python"
        if not (ENVIRONMENTS / self.environment / ".made").is_file():
            raise PeerError(f"its environment is not there: make .bench/{self.environment}/.made")
        command = [str(python), str(_RUNNERS / f"{self.runner}.py"), "--model", str(model)]
        command += ["--threads", str(num_threads)]
        return command + (["--mode", self.mode] if self.mode else [])


PEERS = {
    peer.name: peer
    for peer in (
        Peer("openvino", "openvino_runner", "openvino"),
        Peer("vllm", "vllm_runner", "vllm", "offline"),
        Peer("vllm-server", "vllm_runner", "vllm", "server", ("W4",)),
        Peer("transformers-static", "transformers_runner", "transformers", "static"),
        Peer("transformers-continuous", "transformers_runner", "transformers", "continuous"),
        Peer("llamacpp", "llamacpp_runner", "llamacpp", workloads=("W1", "W2", "W3", "W4")),
    )
}


class PeerProcess:
    """A runner that is ready. `about` is its first line: label, versions, load_s, url."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.about: dict[str, Any] = {}
        self._process = process
        self._log = log
        self._target: Target | None = None

    @property
    def tells_at_end(self) -> bool:
        """Whether nothing is told of a run before all of it is done: a library, no server."""
        return self._target is None

    async def run(self, workload: Workload, first_token_of: Workload | None = None) -> dict[str, Any]:
        """Let the peer run a workload; return its figures, as load.drive has them.

        A peer without a server tells only when all is done. For its time to the first token, where that is asked for,
        it runs `first_token_of` with one token of output; the rest of the time is that of the other tokens. Raises
        PeerError, WrongOutputError.
        """
        if self._target is not None:
            figures = await load.drive(self._target, workload)
            return figures | {"peak_rss_mib": (await self._ask({}))["peak_rss_mib"]}
        first = None
        if first_token_of is not None:
            first = (await self._generate(first_token_of, [1] * len(first_token_of.requests)))["total_s"]
        lengths = [request.num_output_tokens for request in workload.requests]
        answer = await self._generate(workload, lengths)
        return offline_figures(workload, answer, first)

    async def _generate(self, workload: Workload, lengths: list[int]) -> dict[str, Any]:
        answer = await self._ask(
            {"prompts": [list(request.prompt) for request in workload.requests], "lengths": lengths}
        )
        if answer["lengths"] != lengths:
            raise load.WrongOutputError(f"{workload.name}: lengths {answer['lengths']}, wanted {lengths}")
        return answer

    async def _ask(self, what: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what).encode() + b"\n")
        await self._process.stdin.drain()
        return await self._answer()

    async def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise PeerError(f"its runner ended with code {await self._process.wait()}: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{answer['error']}; {self._last_words()}")
        return answer

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep every process of the peer from running meanwhile: some engines spin while they have nothing to do."""
        self._send(signal.SIGSTOP)
        try:
            yield
        finally:
            self._send(signal.SIGCONT)

    def _send(self, signum: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signum)

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return " | ".join(line.strip() for line in lines[-_LAST_LINES:] if line.strip())

    async def _become_ready(self) -> None:
        self.about = await self._answer()
        if url := self.about.get("url"):
            self._target = load.http_target(url)
            await self._target.describe()

    async def _stop(self) -> None:
        """Let the runner stop its engine; what is left after a while is ended by force."""
        if self._target is not None:
            await self._target.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        # Engines leave processes of their own behind when they end badly: the whole group goes.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _STOP_SECONDS)
        self._send(signal.SIGKILL)
        await self._process.wait()


@contextlib.asynccontextmanager
async def open_peer(command: list[str], log: Path, seconds: float) -> AsyncIterator[PeerProcess]:
    """Start a runner, wait until it is ready, end it afterwards. Raises PeerError, also after `seconds` of waiting."""
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            limit=_LINE_BYTES,
            start_new_session=True,
        )
    peer = PeerProcess(process, log)
    try:
        try:
            async with asyncio.timeout(seconds):
                await peer._become_ready()
        except TimeoutError:
            raise PeerError(f"it was not ready after {seconds:.0f} s") from None
        yield peer
    finally:
        await peer._stop()


def offline_figures(workload: Workload, answer: dict[str, Any], first: float | None) -> dict[str, Any]:
    """Return figures of a run of which only the end is known; `first`: seconds to a first token, where measured."""
    total = answer["total_s"]
    figures = {
        "total_s": total,
        "output_tokens_per_s": workload.num_output_tokens / total,
        "peak_rss_mib": answer["peak_rss_mib"],
    }
    if first is None:
        return figures
    later = max(request.num_output_tokens for request in workload.requests) - 1
    return figures | {"ttft_ms": {"mean": 1e3 * first}, "tpot_ms": {"mean": 1e3 * (total - first) / later}}
