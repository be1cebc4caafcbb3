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
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any

from prometheus_client import CollectorRegistry

from octavo.internal.executor.v1 import executor_pb2
from octavo.internal.executor.v1.sequence_pb2 import SamplingParams
from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.rpc.telemetry import JsonFormatter
from scheduler_svc.batch import BatchResult, Event, ExecutorSpec, ScheduledBatch
from scheduler_svc.convert import accepted_frame, batch_result, request_record, step_batch_frame
from scheduler_svc.engine import Engine
from scheduler_svc.engine_loop import EngineLoop
from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.output_streams import OutputStreams
from scheduler_svc.policies.registry import BUILT_IN, load_policy

SIZES = (64, 256, 1024, 4096)
NUM_WAITING = 10_000
STAGES = ("parse result", "apply", "build", "publish", "serialize", "log, metrics, loop")
GATEWAYS = ("a" * 32, "b" * 32)
BLOCK_SIZE = 16
VOCAB_SIZE = 50_000
_DEPTH = 2
_MODEL = "made-up"
_NO_LIMIT = 1 << 20


class Stopwatch:
    """CPU seconds by stage. What is timed within what is timed counts for the inner alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = 0.0
        self._stage: str | None = None

    def enter(self, stage: str | None) -> str | None:
        """Charge what follows to `stage`, None: to nobody. Returns the stage left."""
        now, before = thread_time(), self._stage
        if before is not None:
            self.seconds[before] = self.seconds.get(before, 0.0) + now - self._since
        self._stage, self._since = stage, now
        return before

    def total(self) -> float:
        """CPU seconds of all stages."""
        return sum(self.seconds.values())


class _TimedEngine(Engine):
    """The engine, its part of the time told apart."""

    watch = Stopwatch()

    def update(self, session: int, result: BatchResult, now: float) -> list[Event]:
        """See Engine."""
        before = self.watch.enter("apply")
        events = super().update(session, result, now)
        self.watch.enter(before)
        return events

    def schedule(self, session: int, now: float) -> ScheduledBatch | None:
        """See Engine."""
        before = self.watch.enter("build")
        batch = super().schedule(session, now)
        self.watch.enter(before)
        return batch


class _TimedOutputs(OutputStreams):
    """The outputs of gateways, likewise."""

    watch = Stopwatch()

    def publish(self, events: Any) -> None:
        """See OutputStreams."""
        before = self.watch.enter("publish")
        super().publish(events)
        self.watch.enter(before)


class _Link:
    """Steps on their way to the executor."""

    def __init__(self) -> None:
        self.batches: deque[ScheduledBatch] = deque()

    def send(self, batch: ScheduledBatch) -> None:
        """See ExecutorLink."""
        self.batches.append(batch)


class MadeUpExecutor:
    """Answers every step well and at once: a row that reaches its sequence's last token samples one."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.num_admitted = 0
        self.num_cached_tokens = 0
        self._num_tokens: dict[int, int] = {}

    def run(self, data: bytes) -> bytes:
        """Return the answer to a step, both as bytes."""
        batch = executor_pb2.ExecuteRequest.FromString(data).step_batch
        for handle in batch.released_handles:
            self._num_tokens.pop(handle, None)
        for new in batch.new_sequences:
            self._num_tokens[new.handle] = len(new.token_ids)
            self.num_cached_tokens += new.num_cached_tokens
        self.num_admitted += len(batch.new_sequences)
        self.num_rows = len(batch.handles)
        counts = []
        columns = zip(batch.handles, batch.num_computed_tokens, batch.num_scheduled_tokens, strict=True)
        for handle, computed, scheduled in columns:
            samples = computed + scheduled == self._num_tokens.get(handle)
            counts.append(int(samples))
            if samples:
                self._num_tokens[handle] += 1
        result = executor_pb2.StepResult(
            session=batch.session,
            step=batch.step,
            handles=batch.handles,
            statuses=[executor_pb2.ROW_STATUS_OK] * len(counts),
            num_sampled_tokens=counts,
            token_ids=[(batch.step * 31 + row * 7) % VOCAB_SIZE for row in range(sum(counts))],
        )
        for stage in ("queue", "prepare", "forward", "sample"):
            getattr(result.timings, stage).FromMilliseconds(1)
        return executor_pb2.ExecuteResponse(step_result=result).SerializeToString()


@dataclass
class Step:
    """What one step took, in CPU seconds, and how many rows its result had."""

    num_rows: int
    seconds: float
    stages: dict[str, float] = field(default_factory=dict)


class Cell:
    """A scheduler's insides with a made-up executor; `step` goes once round."""

    def __init__(self, loop: EngineLoop, engine: _TimedEngine, outputs: _TimedOutputs, spec: ExecutorSpec) -> None:
        self.engine = engine
        self.executor = MadeUpExecutor()
        self._loop = loop
        self._outputs = outputs
        self._link = _Link()
        self._counters = itertools.count(1)
        self._streams = [outputs.open(gateway) for gateway in GATEWAYS]
        self._session = loop.join(spec, self._link)
        self._answers: deque[bytes] = deque()
        self._watch = Stopwatch()

    def submit(self, prompt: Sequence[int], max_tokens: int, *, deadline: float | None = None) -> None:
        """Take in a request as it comes from a gateway, from the bytes of its Submit to those of its Accepted."""
        counter = next(self._counters)
        submit = scheduler_pb2.Submit(
            request=counter,
            model=_MODEL,
            model_revision="r1",
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=1.0, seed=counter),
            choices=[scheduler_pb2.ChoiceRecord()],
        )
        submit.stopping.max_tokens = max_tokens
        submit.stopping.stop_token_ids.append(VOCAB_SIZE)
        if deadline is not None:
            submit.remaining_deadline.FromMilliseconds(round(deadline * 1000))
        data = scheduler_pb2.AttachRequest(submit=submit).SerializeToString()
        before = self._watch.enter("submit")
        frame = scheduler_pb2.AttachRequest.FromString(data)
        num_cached_tokens = self._loop.submit(request_record(GATEWAYS[counter % len(GATEWAYS)], frame.submit))
        accepted_frame(counter, num_cached_tokens).SerializeToString()
        self._watch.enter(before)

    async def step(self) -> Step:
        """Answer the oldest step, and see to it that as many are in flight as before."""
        if not self._answers:
            await self._settle()
            self._send()
        if not self._answers:
            raise SystemExit("the scheduler has nothing to do")
        data, watch = self._answers.popleft(), Stopwatch()
        self.engine.watch = self._outputs.watch = self._watch = watch
        watch.enter("parse result")
        frame = executor_pb2.ExecuteResponse.FromString(data)
        result = batch_result(frame.step_result, self._session)
        watch.enter("log, metrics, loop")
        self._loop.apply(self._session, result)
        await self._settle()
        self._write_gateways()
        self._send()
        watch.enter(None)
        return Step(len(result.columns.handles), watch.total(), watch.seconds)

    async def _settle(self) -> None:
        """Let the loop build what it will: a round, one that finds nothing to do, and its way back to sleep."""
        for _ in range(2 + _DEPTH):
            await asyncio.sleep(0)

    def _write_gateways(self) -> None:
        for stream in self._streams:
            self._watch.enter("publish")
            while (frame := stream.next_frame()) is not None:
                self._watch.enter("serialize")
                frame.SerializeToString()
                self._watch.enter("publish")
            stream.acknowledge(stream.next_sequence - 1)

    def _send(self) -> None:
        while self._link.batches:
            before = self._watch.enter("serialize")
            data = step_batch_frame(self._link.batches.popleft(), 1).SerializeToString()
            self._watch.enter(None)
            self._answers.append(self.executor.run(data))
            self._watch.enter(before)


@contextlib.asynccontextmanager
async def open_cell(
    max_num_seqs: int, *, num_blocks: int, budget: int | None = None, policy: str = "fcfs"
) -> AsyncIterator[Cell]:
    """Make a cell of one executor. budget: tokens of a step, by default enough for two prompts beside the decodes."""
    registry = CollectorRegistry()
    engine = _TimedEngine(load_policy(policy), _DEPTH)
    outputs = _TimedOutputs(1 << 40)
    loop = EngineLoop(engine, outputs, SchedulerMetrics(registry))
    spec = ExecutorSpec(
        address="127.0.0.1:1",
        incarnation="e" * 32,
        model=_MODEL,
        model_revision="r1",
        tokenizer_hash="t",
        fingerprint="f",
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget or max_num_seqs + 512,
        max_model_len=_NO_LIMIT,
        vocab_size=VOCAB_SIZE,
    )
    running = asyncio.create_task(loop.run())
    try:
        yield Cell(loop, engine, outputs, spec)
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


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
        for _ in range(_DEPTH + 1):
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
        watch = cell._watch
        for _ in range(num_requests):
            cell.submit(next(texts), 1)
        seconds = watch.total()
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
