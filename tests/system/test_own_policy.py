"""A policy in a user's own file, given to a real scheduler process by its flag."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from metrics_page import scrape
from pages import ROOT, blocks
from wire_executor import TIMEOUT, FakeExecutor, expected_tokens
from wire_gateway import FakeGateway

PAGE = ROOT / "docs" / "writing-a-policy.md"

BROKEN = """
from scheduler_svc.policies.base import BaseScheduler


class Broken(BaseScheduler):
    def admission_key(self, view, now):
        return (float("nan"),)

    def choose_victim(self, running, wanting, now):
        return running[99]
"""


@dataclass(frozen=True)
class SchedulerProcess:
    """A scheduler at work in a process of its own."""

    port: int
    metrics_port: int


@contextlib.asynccontextmanager
async def scheduler_process(folder: Path, policy: str, executor: FakeExecutor) -> AsyncIterator[SchedulerProcess]:
    """Run `python -m scheduler_svc --policy ...` in a folder; it must end well when it is told to stop."""
    flags = ("--policy", policy, "--executors", executor.address, "--port", "0", "--metrics-port", "0")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "scheduler_svc", *flags, "--check-invariants", cwd=folder, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    lines: list[str] = []
    reader: asyncio.Future[None] | None = None
    try:
        async with asyncio.timeout(TIMEOUT):
            while '"scheduler listening"' not in (lines[-1] if lines else ""):
                line = await process.stderr.readline()
                assert line, "".join(lines)
                lines.append(line.decode())
        # Nobody else reads its log, and a full pipe would stop it.
        reader = asyncio.ensure_future(_read_on(process.stderr, lines))
        told = json.loads(lines[-1])
        yield SchedulerProcess(told["port"], told["metrics_port"])
    finally:
        process.terminate()
        async with asyncio.timeout(TIMEOUT):
            code = await process.wait()
        if reader is not None:
            await reader
    assert code == 0, "".join(lines)


async def _read_on(stream: asyncio.StreamReader, lines: list[str]) -> None:
    while line := await stream.readline():
        lines.append(line.decode())


def admitted(executor: FakeExecutor) -> list[int]:
    """First tokens of the prompts, in the order in which the executor got them."""
    return [new.token_ids[0] for batch in executor.batches for new in batch.new_sequences]


@pytest.mark.asyncio
async def test_the_policy_of_the_page_works_as_it_stands_there(tmp_path: Path) -> None:
    """Under 20 lines, copied from the page, with no change to anything of ours: the tenant that had less is next."""
    (block,) = [block for block in blocks(PAGE) if block.language == "python"]
    assert len(block.source.splitlines()) < 20
    assert "`--policy fair_policy:LeastServedFirst`" in PAGE.read_text()
    (tmp_path / "fair_policy.py").write_text(block.source)
    executor = await FakeExecutor(max_num_seqs=1).start()
    executor.hold()
    try:
        async with scheduler_process(tmp_path, "fair_policy:LeastServedFirst", executor) as scheduler:
            gateway = FakeGateway(scheduler.port)
            try:
                await gateway.attach()
                await gateway.until_load(lambda load: len(load.executors) == 1)
                await gateway.submit(1, [1] * 9, 9, tenant="busy")
                await gateway.until_load(lambda load: load.num_running == 1)
                # Some steps, so that the first tenant has had something.
                executor.permit(4)
                await gateway.until(lambda: len(gateway.outcomes[1].tokens.get(0, ())) >= 3)
                for counter, tenant in ((2, "busy"), (3, "busy"), (4, "quiet")):
                    await gateway.submit(counter, [counter] * 5, 2, tenant=tenant)
                await gateway.until_load(lambda load: load.num_waiting == 3)
                executor.release()
                await gateway.over(1, 2, 3, 4)
                assert admitted(executor) == [1, 4, 2, 3]
                for counter, length, max_tokens in ((1, 9, 9), (2, 5, 2), (3, 5, 2), (4, 5, 2)):
                    assert gateway.outcomes[counter].tokens[0] == expected_tokens([counter] * length, max_tokens)
                page = await scrape(scheduler.metrics_port)
                assert not any(value for name, value in page.items() if name.startswith("octavo_policy_failures"))
                assert gateway.faults == executor.faults == []
            finally:
                await gateway.close()
    finally:
        await executor.stop()


@pytest.mark.asyncio
async def test_a_broken_policy_serves_first_come_first_served_and_shows(tmp_path: Path) -> None:
    """Where a user's hooks raise and answer NaN, every request is served, in order, and the page counts each hook."""
    (tmp_path / "broken.py").write_text(BROKEN)
    executor = await FakeExecutor(max_num_seqs=2, num_blocks=8).start()
    executor.hold()
    try:
        async with scheduler_process(tmp_path, "broken:Broken", executor) as scheduler:
            gateway = FakeGateway(scheduler.port)
            try:
                await gateway.attach()
                await gateway.until_load(lambda load: len(load.executors) == 1)
                for counter in range(1, 6):
                    # This executor knows no shared blocks.
                    await gateway.submit(counter, [counter] * 5, 12, bypass_cache=True)
                await gateway.until_load(lambda load: load.num_requests == 5)
                executor.release()
                await gateway.over(*range(1, 6))
                assert list(dict.fromkeys(admitted(executor))) == [1, 2, 3, 4, 5]
                for counter in range(1, 6):
                    assert gateway.outcomes[counter].tokens[0] == expected_tokens([counter] * 5, 12)
                page = await scrape(scheduler.metrics_port)
                for hook in ("admission_key", "choose_victim"):
                    assert page[f'octavo_policy_failures_total{{hook="{hook}"}}'] > 0
                assert gateway.faults == executor.faults == []
            finally:
                await gateway.close()
    finally:
        await executor.stop()
