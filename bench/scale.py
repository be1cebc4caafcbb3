"""What grows with the number of executors, and what one scheduler carries: python bench/scale.py [--json OUT].

Measured here, in one process, by the scheduler's own code (bench/scheduler_cell.py): messages and bytes of each hop by
token, at 64 sequences a step; CPU time of a step while so many other executors are in session, each with as many steps
unanswered as it may have; and CPU time to place a request among so many. What a token costs whole processes comes from
bench/dataplane.py: `--dataplane FILE` is what it wrote; without, it is run now.

The table then tells, for executors whose steps of 64 sequences take `--step-ms`, how many schedulers (so, cells) and
gateways their tokens take, each at `--share` of one CPU, and what crosses each hop.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any

from scheduler import as_in_service, prompts, typical, us_a_row
from scheduler_cell import BLOCK_SIZE, HOPS, Cell, open_cell

from octavo.internal.executor.v1.sequence_pb2 import SamplingParams
from octavo.v1 import inference_pb2
from scheduler_svc.batch import ScheduledBatch
from scheduler_svc.request_record import ChoiceRecord, RequestRecord, StoppingParams

SCHEMA = "octavo.bench.scale/1"
ROWS = 64
SIZES = (1, 10, 100, 1000, 10_000)
_FOLDER = Path(__file__).parent
_OTHER = "other"
_GATEWAY, _OTHER_GATEWAY = "c" * 32, "d" * 32
_PROMPT_TOKENS = 512
_DELTA = inference_pb2.GenerateResponse(
    delta=inference_pb2.Delta(choice=0, first_token_index=100, text=" word", token_ids=[12345])
)
"""A message to a client with one token, of the length of an English word."""


class _Unanswered:
    """An executor that is in the middle of its steps."""

    def send(self, batch: ScheduledBatch) -> None:
        """See ExecutorLink."""


def _record(counter: int, max_tokens: int) -> RequestRecord:
    prompt = next(prompts(_PROMPT_TOKENS))
    return RequestRecord(
        id=(_OTHER_GATEWAY, counter),
        label="",
        model=_OTHER,
        model_revision="r1",
        tenant="",
        prompt_token_ids=(counter % 1000, *prompt[1:]),
        sampling=SamplingParams(seed=counter),
        stopping=StoppingParams(max_tokens, 0, frozenset()),
        choices=(ChoiceRecord(),),
        age=0.0,
        remaining_deadline=None,
        traceparent="",
        was_accepted=False,
    )


async def _decoding(cell: Cell) -> None:
    """Bring a cell to where 64 sequences decode and nothing else happens."""
    texts = prompts(64)
    for _ in range(ROWS):
        cell.submit(next(texts), 64 * BLOCK_SIZE)
    while cell.executor.num_rows < ROWS:
        await cell.step()
    for _ in range(4):
        await cell.step()


async def hops(num_steps: int) -> dict[str, dict[str, float]]:
    """Return messages and bytes by token of each hop, for one gateway."""
    async with open_cell(ROWS, num_blocks=1 + ROWS * 80, budget=1024, gateways=(_GATEWAY,)) as cell:
        await _decoding(cell)
        before = dict(cell.num_messages), dict(cell.num_bytes)
        for _ in range(num_steps):
            await cell.step()
        num_tokens = ROWS * num_steps
        told = {
            hop: {
                "messages_per_token": round((cell.num_messages[hop] - before[0][hop]) / num_tokens, 4),
                "bytes_per_token": round((cell.num_bytes[hop] - before[1][hop]) / num_tokens, 2),
            }
            for hop in HOPS
        }
    return told | {"deltas": {"messages_per_token": 1.0, "bytes_per_token": float(_DELTA.ByteSize())}}


async def crowd(num_executors: int, num_steps: int) -> dict[str, float]:
    """Measure a step of one executor, and placements, while so many others of another model are in session."""
    async with open_cell(ROWS, num_blocks=1 + ROWS * 80, budget=1024, gateways=(_GATEWAY,)) as cell:
        other = dataclasses.replace(cell.spec, model=_OTHER, num_blocks=257, max_model_len=2048)
        for number in range(num_executors):
            cell.loop.join(dataclasses.replace(other, incarnation=f"{number:032x}"), _Unanswered())
        for number in range(num_executors):
            cell.loop.submit(_record(number + 1, 256))
        await _decoding(cell)
        gc.collect()
        steps = [await cell.step() for _ in range(num_steps)]
        seconds = []
        for number in range(20):
            record = _record(num_executors + number + 1, 256)
            began = thread_time()
            cell.loop.submit(record)
            seconds.append(thread_time() - began)
    return {
        "us_per_token": us_a_row(typical([steps])),
        "us_per_request": round(1e6 * median(seconds), 1),
    }


def dataplane(file: Path | None) -> dict[str, Any]:
    """Return the figures of bench/dataplane.py, from a file or from a run."""
    if file is None:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "dataplane.json"
            command = [sys.executable, str(_FOLDER / "dataplane.py"), "--json", str(out)]
            if subprocess.run(command, check=False).returncode:
                raise SystemExit("bench/dataplane.py has failed")
            return dataplane(out)
    figures: dict[str, Any] = json.loads(file.read_text())
    return figures


def on_paper(
    told: dict[str, dict[str, float]], measured: dict[str, Any], step_ms: float, share: float
) -> list[dict[str, Any]]:
    """Return what so many executors take, by the figures measured."""
    each = ROWS * 1e3 / step_ms
    per_scheduler = share * measured["tokens_per_s"]
    gateways = {
        interval: share * 1e6 / figures["us_per_token"]["grpc"] for interval, figures in measured["gateway"].items()
    }
    rows = []
    for number in SIZES:
        tokens = number * each
        rows.append(
            {
                "num_executors": number,
                "tokens_per_s": round(tokens),
                "num_schedulers": math.ceil(tokens / per_scheduler),
                "num_gateways": {interval: math.ceil(tokens / rate) for interval, rate in gateways.items()},
                "mb_per_s": {hop: round(tokens * figures["bytes_per_token"] / 1e6, 3) for hop, figures in told.items()},
                "messages_per_s": {hop: round(tokens * figures["messages_per_token"]) for hop, figures in told.items()},
            }
        )
    return rows


async def run(sizes: Sequence[int], num_steps: int) -> dict[str, Any]:
    """Measure what this script measures itself."""
    with as_in_service():
        told = await hops(num_steps)
        crowds = {str(number): await crowd(number, num_steps) for number in sizes}
    return {"schema": SCHEMA, "rows_per_step": ROWS, "hops": told, "by_executors": crowds}


def print_tables(figures: dict[str, Any]) -> None:
    """Print what a reader wants."""
    print(f"{'hop':16}{'messages/token':>16}{'bytes/token':>14}")
    for hop, told in figures["hops"].items():
        print(f"{hop:16}{told['messages_per_token']:16.4f}{told['bytes_per_token']:14.1f}")
    print(f"\n{'executors':>10}{'us/token':>10}{'us to place a request':>23}")
    for number, costs in figures["by_executors"].items():
        print(f"{number:>10}{costs['us_per_token']:10.2f}{costs['us_per_request']:23.1f}")
    print(
        f"\none scheduler carries {figures['executors_per_scheduler']:.1f} executors, one gateway "
        f"{figures['executors_per_gateway']:.2f} (--stream-interval 16: {figures['executors_per_gateway_16']:.2f})"
    )
    print(f"{'executors':>10}{'tokens/s':>12}{'schedulers':>12}{'gateways':>10}{'with 16':>9}{'MB/s in the cell':>18}")
    for row in figures["on_paper"]:
        inside = sum(row["mb_per_s"][hop] for hop in HOPS)
        gateways = row["num_gateways"]
        print(
            f"{row['num_executors']:10}{row['tokens_per_s']:12}{row['num_schedulers']:12}{gateways['1']:10}"
            f"{gateways['16']:9}{inside:18.2f}"
        )


def main() -> int:
    """Measure, print the tables, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dataplane", type=Path, metavar="FILE", help="what bench/dataplane.py wrote [default: run it]"
    )
    parser.add_argument("--step-ms", type=float, default=25.0, help="of a step of 64 sequences [default: 25]")
    parser.add_argument("--share", type=float, default=0.7, help="of a CPU that a process may use [default: 0.7]")
    parser.add_argument("--steps", type=int, default=64, help="steps of each measurement [default: 64]")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file")
    args = parser.parse_args()
    figures = asyncio.run(run(SIZES[:-1], args.steps))
    measured = dataplane(args.dataplane)
    each = ROWS * 1e3 / args.step_ms
    figures |= {
        "step_ms": args.step_ms,
        "share": args.share,
        "executors_per_scheduler": args.share * measured["tokens_per_s"] / each,
        "executors_per_gateway": args.share * 1e6 / measured["gateway"]["1"]["us_per_token"]["grpc"] / each,
        "executors_per_gateway_16": args.share * 1e6 / measured["gateway"]["16"]["us_per_token"]["grpc"] / each,
        "on_paper": on_paper(figures["hops"], measured, args.step_ms, args.share),
    }
    print_tables(figures)
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
