"""What a step costs the scheduler: python bench/scheduler.py [--json OUT].

The real engine loop, its log, its metrics and the real conversion run between an executor and gateways that are made up
here, without sockets. A step is measured from the bytes of a StepResult to the bytes of the frames for the gateways and
of the StepBatch that goes out next, with two steps in flight, as in service. What is measured is CPU time of the
thread, so that other processes count for little; the cases take turns, and of equal steps the medians count.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from scheduler_cell import BLOCK_SIZE, DEPTH, STAGES, VOCAB_SIZE, Step, open_cell

from octavo.rpc.telemetry import JsonFormatter
from scheduler_svc.policies.registry import BUILT_IN

SIZES = (64, 256, 1024, 4096)
NUM_WAITING = 10_000


def prompts(num_tokens: int) -> Iterator[list[int]]:
    """Yield prompts without end, all different from their first token on."""
    for index in itertools.count():
        yield [index % VOCAB_SIZE, *((index * 7919 + place * 31) % VOCAB_SIZE for place in range(1, num_tokens))]


async def decode(num_running: int, num_steps: int, *, full_cache: bool = False) -> list[Step]:
    """Measure steps in which so many sequences decode and nothing else happens.

    full_cache: every block that nobody owns holds what requests before left behind, so each new block takes the place
    of one of theirs.
    """
    each = -(-(64 + 2 * BLOCK_SIZE + num_steps) // BLOCK_SIZE)
    async with open_cell(num_running, num_blocks=1 + num_running * each, budget=16 * num_running + 512) as cell:
        texts = prompts(64)
        if full_cache:
            for _ in range(num_running * each * BLOCK_SIZE // 64):
                cell.submit(next(texts), 1)
            while cell.engine.load().num_requests:
                await cell.step()
        for _ in range(num_running):
            cell.submit(next(texts), each * BLOCK_SIZE - 64)
        while cell.executor.num_rows < num_running or cell.engine.load().num_waiting:
            await cell.step()
        for _ in range(DEPTH + 1):
            await cell.step()
        gc.collect()
        steps = [await cell.step() for _ in range(num_steps)]
    assert all(step.num_rows == num_running for step in steps), "not everybody decodes"
    return steps


async def crowd(num_waiting: int, num_steps: int, policy: str = "fcfs") -> list[Step]:
    """Measure steps with a long queue: sequences end in each step, and the next are admitted; memory is short too."""
    async with open_cell(256, num_blocks=1 + 256 * 12, budget=2048, policy=policy) as cell:
        texts = prompts(96)
        for index in range(num_waiting + 512 + 8 * num_steps):
            cell.submit(next(texts)[: 32 + index % 64], 16 + index % 96, deadline=600.0 + index % 500)
        for _ in range(2 * BLOCK_SIZE):
            await cell.step()
        gc.collect()
        steps = [await cell.step() for _ in range(num_steps)]
        assert cell.engine.load().num_waiting >= num_waiting, "the queue got too short"
    return steps


async def admit(num_requests: int) -> float:
    """Return CPU seconds a request of 128 tokens takes from its Submit to its row, its one token and its end."""
    async with open_cell(256, num_blocks=1 + 256 * 16, budget=8192) as cell:
        texts = prompts(128)
        for _ in range(num_requests):
            cell.submit(next(texts), 1)
        seconds = cell.submit_seconds()
        while cell.engine.load().num_requests:
            seconds += (await cell.step()).seconds
    return seconds / num_requests


@contextlib.contextmanager
def as_in_service() -> Iterator[None]:
    """Log as the service does, into nothing, and leave what imports made out of the garbage collector's sight."""
    handler = logging.FileHandler(os.devnull)
    handler.setFormatter(JsonFormatter("scheduler"))
    logger = logging.getLogger("scheduler_svc")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
        handler.close()


def typical(rounds: Sequence[Sequence[Step]]) -> list[Step]:
    """Return the steps of one round without disturbance.

    Step i does the same work in every round, so of each step and stage the median over the rounds counts.
    """
    steps = []
    for same in zip(*rounds, strict=True):
        stages = {stage: median(step.stages.get(stage, 0.0) for step in same) for stage in STAGES}
        steps.append(Step(same[0].num_rows, median(step.seconds for step in same), stages))
    return steps


def us_a_row(steps: Sequence[Step], stage: str | None = None) -> float:
    """Return microseconds for a sequence and step, of a stage or all."""
    seconds = sum(step.seconds if stage is None else step.stages.get(stage, 0.0) for step in steps)
    return round(1e6 * seconds / sum(step.num_rows for step in steps), 3)


async def run(sizes: Sequence[int], num_steps: int, num_waiting: int, num_rounds: int) -> dict[str, Any]:
    """Measure every case in turn, so many times."""
    full_size = min(sizes, key=lambda size: abs(size - 1024))
    decodes: dict[int, list[list[Step]]] = {size: [] for size in sizes}
    full: list[list[Step]] = []
    crowds: dict[str, list[list[Step]]] = {policy: [] for policy in BUILT_IN}
    admissions: list[float] = []
    with as_in_service():
        for _ in range(num_rounds):
            for size in sizes:
                decodes[size].append(await decode(size, num_steps))
            full.append(await decode(full_size, num_steps, full_cache=True))
            for policy, measured in crowds.items():
                measured.append(await crowd(num_waiting, num_steps, policy))
            admissions.append(await admit(min(num_waiting, 2000)))
    steps = {size: typical(each) for size, each in decodes.items()}
    full_steps = typical(full)
    slowest = {policy: round(1e3 * max(step.seconds for step in typical(each)), 3) for policy, each in crowds.items()}
    return {
        "us_per_sequence_step": {str(size): us_a_row(each) for size, each in steps.items()},
        "max_step_ms_10k_waiting": max(slowest.values()),
        "admitted_per_s": round(1 / median(admissions)),
        "breakdown_us": {str(size): {stage: us_a_row(each, stage) for stage in STAGES} for size, each in steps.items()},
        "full_cache": {
            "num_running": full_size,
            "us_per_sequence_step": us_a_row(full_steps),
            "breakdown_us": {stage: us_a_row(full_steps, stage) for stage in STAGES},
        },
        "max_step_ms_by_policy": slowest,
        "num_waiting": num_waiting,
        "num_steps": num_steps,
        "num_rounds": num_rounds,
    }


def print_tables(figures: dict[str, Any]) -> None:
    """Print what a reader wants."""
    full = figures["full_cache"]
    columns = {size: (figures["us_per_sequence_step"][size], us) for size, us in figures["breakdown_us"].items()}
    columns[f"{full['num_running']} (full cache)"] = (full["us_per_sequence_step"], full["breakdown_us"])
    print("microseconds of CPU for a sequence and step, by sequences running")
    print(f"{'':20}" + "".join(f"{name:>20}" for name in columns))
    for stage in STAGES:
        print(f"{stage:20}" + "".join(f"{stages[stage]:20.3f}" for _, stages in columns.values()))
    print(f"{'all':20}" + "".join(f"{total:20.3f}" for total, _ in columns.values()))
    print(f"\nslowest of {figures['num_steps']} steps with {figures['num_waiting']} waiting, by policy")
    for policy, slowest in figures["max_step_ms_by_policy"].items():
        print(f"{policy:20}{slowest:17.2f} ms")
    print(f"\nrequests taken in, run for a token and ended: {figures['admitted_per_s']} a second of CPU")


def main() -> int:
    """Measure, print the tables, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=32, help="steps of each measurement [default: 32]")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each case [default: 3]")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file")
    args = parser.parse_args()
    figures = asyncio.run(run(SIZES, args.steps, NUM_WAITING, args.rounds))
    print_tables(figures)
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
