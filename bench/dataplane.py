"""What a token costs the processes that it passes through: python bench/dataplane.py [--json OUT].

A scheduler runs as a process of its own between executors that are made up (one process, each executor on a port of its
own, 64 sequences a step) and gateways that throw away what they get (this process), all over loopback gRPC. What is
measured, the CPU time of the scheduler's process with all its threads, holds everything that a token costs it:
messages, conversion, batches, logs. `tokens_per_s` is tokens by such a second, with executors that answer at once, so
that the scheduler is never without work; `paced` is the same with steps of `--step-ms`, where each message wakes it.

Of equal rounds the best counts: other work on the machine makes a token dearer, never cheaper.

The gateway is measured apart, by bench/gateway.py: `gateway_tokens_per_cpu_s`, where each token of each stream is a
message, and `gateway` by `--stream-interval`, where several share one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop
from made_up_executors import READY
from service_process import ServiceProcess, script_process, service_process
from sink_gateway import PROMPT_TOKENS, SinkGateway, sink_gateways

SCHEMA = "octavo.bench.dataplane/1"
GOAL = 100_000
ROWS = 64
_FOLDER = Path(__file__).parent
_START_SECONDS = 60.0
STREAM_INTERVALS = (1, 4, 16)


async def measure(num_executors: int, num_gateways: int, step_ms: float, args: argparse.Namespace) -> dict[str, Any]:
    """Run one scheduler for a while; returns its figures."""
    flags = [str(_FOLDER / "made_up_executors.py"), str(num_executors), "--step-ms", str(step_ms), "--rows", str(ROWS)]
    async with script_process(flags, READY) as executors:
        addresses = ",".join(executors.line["addresses"])
        waiting = str(num_executors * ROWS)
        async with service_process("scheduler_svc", {"executors": addresses, "max-waiting": waiting}) as scheduler:
            # A sequence for every row, and no more: nobody waits, so that what is measured is the way of tokens.
            live = num_executors * ROWS
            async with sink_gateways(scheduler.address, num_gateways, live, args.tokens) as sinks:
                for sink in sinks:
                    await sink.begin()
                await _run_in(sinks, live)
                return await _count(scheduler, sinks, args.seconds) | {
                    "num_executors": num_executors,
                    "num_gateways": num_gateways,
                    "step_ms": step_ms,
                }


async def _run_in(sinks: list[SinkGateway], num_live: int) -> None:
    """Return once the first requests have ended: by then all rows are taken, and ends are spread over the steps."""
    async with asyncio.timeout(_START_SECONDS):
        while sum(sink.num_ended for sink in sinks) < num_live // 4:  # noqa: ASYNC110 - nobody tells of a count
            await asyncio.sleep(0.02)


async def _count(scheduler: ServiceProcess, sinks: list[SinkGateway], seconds: float) -> dict[str, Any]:
    def counts() -> tuple[float, ...]:
        sums = [sum(getattr(sink, name) for sink in sinks) for name in ("num_tokens", "num_frames", "num_ended")]
        return (time.perf_counter(), scheduler.cpu_seconds(), *sums)

    before = counts()
    await asyncio.sleep(seconds)
    wall, cpu, tokens, frames, ended = (after - first for after, first in zip(counts(), before, strict=True))
    return {
        "tokens_per_cpu_s": round(tokens / cpu),
        "us_per_token": round(1e6 * cpu / tokens, 2),
        "tokens_per_wall_s": round(tokens / wall),
        "cpu_share": round(cpu / wall, 3),
        "tokens_per_frame": round(tokens / frames, 1),
        "requests_per_cpu_s": round(ended / cpu, 1),
    }


async def measure_gateway(stream_interval: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run bench/gateway.py; returns its figures."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "gateway.json"
        given = {"streams": ROWS, "tokens": args.gateway_tokens, "repeats": args.rounds, "json": out}
        flags = {**given, "stream-interval": stream_interval}
        argv = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(_FOLDER / "gateway.py"), *argv, stdout=asyncio.subprocess.DEVNULL
        )
        if await process.wait():
            raise SystemExit("bench/gateway.py has failed")
        figures: dict[str, Any] = json.loads(out.read_text())
        return figures


def best(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the round in which a token cost least."""
    return min(rounds, key=lambda figures: float(figures["us_per_token"]))


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything in turn."""
    cases = [(number, step_ms) for step_ms in (0.0, args.step_ms) for number in args.executors]
    rounds: dict[tuple[int, float], list[dict[str, Any]]] = {case: [] for case in cases}
    for _ in range(args.rounds):
        for number, step_ms in cases:
            rounds[number, step_ms].append(await measure(number, args.gateways, step_ms, args))
    fast, paced = ([best(rounds[number, step_ms]) for number in args.executors] for step_ms in (0.0, args.step_ms))
    figures: dict[str, Any] = {
        "schema": SCHEMA,
        "goal": GOAL,
        "rows_per_step": ROWS,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": args.tokens,
        "at_once": fast,
        "paced": paced,
        "tokens_per_s": fast[-1]["tokens_per_cpu_s"],
        "paced_tokens_per_cpu_s": paced[-1]["tokens_per_cpu_s"],
    }
    if not args.no_gateway:
        figures["gateway"] = {str(each): await measure_gateway(each, args) for each in STREAM_INTERVALS}
        costs = figures["gateway"]["1"]["us_per_token"]
        figures["gateway_tokens_per_cpu_s"] = round(1e6 / costs["grpc"])
        figures["gateway_http_tokens_per_cpu_s"] = round(1e6 / costs["http"])
    return figures


def print_table(figures: dict[str, Any]) -> None:
    """Print what a reader wants."""
    print(
        f"{'executors':>10}{'step ms':>9}{'tokens/CPU s':>14}{'us/token':>10}{'tokens/s':>10}{'CPU':>7}"
        f"{'tokens/frame':>14}"
    )
    for row in (*figures["at_once"], *figures["paced"]):
        print(
            f"{row['num_executors']:10}{row['step_ms']:9g}{row['tokens_per_cpu_s']:14}{row['us_per_token']:10.2f}"
            f"{row['tokens_per_wall_s']:10}{row['cpu_share']:7.0%}{row['tokens_per_frame']:14.1f}"
        )
    print(f"\nthrough one scheduler: {figures['tokens_per_s']} tokens by second of CPU (goal {figures['goal']})")
    for interval, told in figures.get("gateway", {}).items():
        rates = {front: round(1e6 / us) for front, us in told["us_per_token"].items()}
        print(
            f"through one gateway, --stream-interval {interval}: {rates['grpc']} over gRPC, {rates['http']} over HTTP"
        )


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    """Measure, print a table, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executors", type=_numbers, default=[1, 4], metavar="N,N,...", help="how many [default: 1,4]")
    parser.add_argument("--gateways", type=int, default=1, help="gateways that share the requests [default: 1]")
    parser.add_argument(
        "--tokens", type=int, default=256, help="shortest output; the longest is twice it [default: 256]"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each case is counted [default: 3]")
    parser.add_argument("--rounds", type=int, default=2, help="how often, of which the best counts [default: 2]")
    parser.add_argument("--step-ms", type=float, default=25.0, help="a step of the paced cases [default: 25]")
    parser.add_argument("--gateway-tokens", type=int, default=193, help="of each of its streams [default: 193]")
    parser.add_argument("--no-gateway", action="store_true", help="leave the gateway out")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file")
    args = parser.parse_args()
    figures = uvloop.run(run(args))
    print_table(figures)
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
