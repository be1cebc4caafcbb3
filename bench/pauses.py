"""How long streams stand still when one thing goes wrong: each kind of fault by itself, on a cell that serves.

    python bench/pauses.py --json OUT [--repeats N] [--kinds KIND,KIND,...]

Eight streams run on the cell of bench/chaos.py (two gateways, a scheduler, two executors of a tiny model, float32):
once all have tokens one fault is done. Printed for each kind, and written to OUT: the longest that any stream stood
still, the median over the repeats and the worst. A service that was killed starts again at once; that start, of a few
seconds, is part of the pause only where nobody else can do its work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# The harness is the tests'.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from chaos_cell import ChaosCell, chaos_cell
from chaos_faults import KINDS, Fault, Faults, targets_of
from factories import make_llama

import octavo
from octavo.models.prepare import prepare
from octavo.models.prepared import open_prepared

STREAMS = 8
MAX_TOKENS = 1500
NONE = "none"


async def measure(cell: ChaosCell, kind: str, repeat: int) -> float:
    """Return the longest pause of any stream, in seconds, around one fault."""
    worst = 0.0
    has_token = [asyncio.Event() for _ in range(STREAMS)]
    over = asyncio.Event()

    async def read(client: octavo.AsyncClient, index: int) -> None:
        nonlocal worst
        last: float | None = None
        while not over.is_set():
            prompt = [3 + index, 5 + repeat, 7]
            async for _ in client.generate(prompt, max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0):
                now = time.monotonic()
                if last is not None:
                    worst = max(worst, now - last)
                last = now
                has_token[index].set()
                if over.is_set():
                    break

    async with octavo.AsyncClient(cell.client_addresses) as client:
        readers = [asyncio.create_task(read(client, index)) for index in range(STREAMS)]
        await asyncio.gather(*(event.wait() for event in has_token))
        faults = Faults(cell)
        if kind == NONE:
            await asyncio.sleep(2.0)
        else:
            target = targets_of(kind)[0]
            await faults.do(Fault(kind, target, 0.0, 0.0))
            await faults.repaired()
            # Whatever still stands still goes on with this.
            await asyncio.sleep(4.0)
        for event in has_token:
            event.clear()
        await asyncio.gather(*(event.wait() for event in has_token))
        over.set()
        await asyncio.gather(*readers)
    await cell.wait_whole()
    await cell.wait_idle(20.0)
    return worst


async def run(kinds: list[str], repeats: int) -> dict[str, Any]:
    """Measure every kind."""
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="octavo-pauses-") as scratch:
        folder = Path(scratch) / "model"
        make_llama(folder, seed=1)
        prepare(str(folder))
        logs = Path(scratch) / "logs"
        logs.mkdir()
        # Room for all streams on either executor: who waits for blocks stands still without any fault.
        flags = {"executor_svc": {"kv-memory": "32MiB"}}
        async with chaos_cell(open_prepared(str(folder)), logs, flags=flags) as cell:
            for kind in [NONE, *kinds]:
                pauses = [await measure(cell, kind, repeat) for repeat in range(repeats)]
                report[kind] = {"median_s": round(statistics.median(pauses), 3), "worst_s": round(max(pauses), 3)}
                figures = report[kind]
                print(f"{kind:28} median {figures['median_s']:7.3f} s   worst {figures['worst_s']:7.3f} s", flush=True)
    return report


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Measure how long streams stand still at each kind of fault.")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--repeats", type=int, default=3, help="times that each fault is done; default 3")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of faults, with commas between; default: all")
    arguments = parser.parse_args()
    report = asyncio.run(run(arguments.kinds.split(","), arguments.repeats))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
