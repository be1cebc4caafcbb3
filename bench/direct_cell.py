"""The scheduler's engine and the executor's device thread in one process, called directly: tokens in, tokens out.

No gateway, no gRPC, no serialization: what a workload takes at the least with this engine and this model. For
bench/overhead.py, which runs it as a process of its own: direct_cell.py FLAGS..., those of the executor. A line of
standard input is a workload as JSON (`name`, `repeat`, `num_requests`), a line of standard output its figures; the
first line of output says that the model is loaded.
"""

from __future__ import annotations

import os

# As in executor_svc/__main__.py, and for the same reason.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import asyncio
import dataclasses
import gc
import itertools
import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import uvloop
import workloads
from workloads import Workload

from executor_svc import batch as executor_words
from executor_svc.load import plan_load
from executor_svc.worker import SessionEvent, SessionReady, Worker
from octavo.rpc.stages import Stages
from octavo.settings import ExecutorSettings, load
from scheduler_svc.batch import (
    BatchResult,
    ExecutorSpec,
    RequestDone,
    ResultColumns,
    RowStatus,
    ScheduledBatch,
    StepTokens,
)
from scheduler_svc.engine import Engine
from scheduler_svc.policies.registry import load_policy
from scheduler_svc.request_record import ChoiceRecord, RequestRecord, StoppingParams

DEPTH = 2
_GATEWAY, _MODEL, _REVISION = "g" * 32, "model", "r1"
_NUM_WARM_UPS = 2


def step_batch(batch: ScheduledBatch) -> executor_words.StepBatch:
    """Return a step of the scheduler in the executor's words."""
    columns = batch.columns
    new_blocks = [columns.new_blocks.get(row, ()) for row in range(batch.num_rows)]
    return executor_words.StepBatch(
        session=batch.session,
        step=batch.step,
        released_handles=batch.released_handles,
        new_sequences=tuple(
            executor_words.NewSequence(
                new.handle,
                new.token_ids,
                new.num_prompt_tokens,
                new.choice,
                executor_words.SamplingParams(temperature=0.0),
                executor_words.StoppingParams(new.stopping.max_tokens),
                new.num_cached_tokens,
            )
            for new in batch.new_sequences
        ),
        handles=tuple(columns.handles),
        num_scheduled_tokens=tuple(columns.num_scheduled_tokens),
        num_computed_tokens=tuple(columns.num_computed_tokens),
        num_new_blocks=tuple(map(len, new_blocks)),
        new_blocks=tuple(itertools.chain.from_iterable(new_blocks)),
    )


def batch_result(result: executor_words.StepResult, session: int) -> BatchResult:
    """Return a result of the executor in the scheduler's words. Raises RuntimeError where the step failed."""
    if result.failure is not None:
        raise RuntimeError(f"step {result.step} failed: {result.failure.message}")
    columns = ResultColumns(
        handles=result.handles,
        num_sampled_tokens=[int(token is not None) for token in result.sampled],
        token_ids=[token for token in result.sampled if token is not None],
        statuses={
            row: RowStatus[status.name]
            for row, status in enumerate(result.statuses)
            if status is not executor_words.RowStatus.OK
        },
        logprobs={},
        prompt_logprobs={},
    )
    return BatchResult(session, result.step, columns)


class DirectCell:
    """Engine and worker. One workload at a time; a fault of either ends `run`."""

    def __init__(self, worker: Worker, limits: executor_words.Limits) -> None:
        """`worker`: started, its model loaded."""
        self._engine = Engine(load_policy("fcfs"), DEPTH)
        self._session = self._engine.add_executor(
            ExecutorSpec(
                address="127.0.0.1:1",
                incarnation="e" * 32,
                model=_MODEL,
                model_revision=_REVISION,
                tokenizer_hash="t",
                fingerprint="f",
                **dataclasses.asdict(limits),
            )
        )
        self._device = worker.open(self._session, self._receive)
        self._counters = itertools.count(1)
        self._outputs: dict[int, list[int]] = {}
        self._num_live = 0
        self._steps: list[executor_words.StepResult] = []
        self._done: asyncio.Future[None]

    async def run(self, workload: Workload) -> dict[str, Any]:
        """Send all requests at once and wait for the last token. Raises RuntimeError."""
        records = [self._record(request.prompt, request.num_output_tokens) for request in workload.requests]
        self._outputs = {record.id[1]: [] for record in records}
        self._num_live, self._steps = len(records), []
        self._done = asyncio.get_running_loop().create_future()
        gc.collect()
        gc.freeze()
        started = time.perf_counter()
        try:
            for record in records:
                self._take(self._engine.submit(record, time.monotonic()))
            self._fill()
            await self._done
            seconds = time.perf_counter() - started
        finally:
            gc.unfreeze()
        asked = [request.num_output_tokens for request in workload.requests]
        if [len(tokens) for tokens in self._outputs.values()] != asked:
            raise RuntimeError("a request got another number of tokens than it asked for")
        timings = [step.timings for step in self._steps if step.statuses]
        return {
            "total_s": seconds,
            "num_steps": len(timings),
            "busy_s": sum(each.prepare + each.forward + each.sample for each in timings),
            "idle_s": sum(each.idle or 0.0 for each in timings),
        }

    def _record(self, prompt: Sequence[int], max_tokens: int) -> RequestRecord:
        return RequestRecord(
            id=(_GATEWAY, next(self._counters)),
            label="",
            model=_MODEL,
            model_revision=_REVISION,
            tenant="",
            prompt_token_ids=tuple(prompt),
            sampling=None,
            stopping=StoppingParams(max_tokens, 0, frozenset()),
            choices=(ChoiceRecord(),),
            age=0.0,
            remaining_deadline=None,
            traceparent="",
        )

    def _receive(self, event: SessionEvent) -> None:
        if isinstance(event, SessionReady):
            return
        try:
            self._steps.append(event)
            self._take(self._engine.update(self._session, batch_result(event, self._session), time.monotonic()))
            self._fill()
        except Exception as error:
            if not self._done.done():
                self._done.set_exception(error)
            return
        if not self._num_live and not self._done.done():
            self._done.set_result(None)

    def _take(self, events: Iterable[object]) -> None:
        for event in events:
            if isinstance(event, StepTokens):
                for counter, token_id in zip(event.requests, event.token_ids, strict=True):
                    self._outputs[counter].append(token_id)
            elif isinstance(event, RequestDone):
                if event.error is not None:
                    raise RuntimeError(event.error.message)
                self._num_live -= 1
            else:
                self._outputs[event.request[1]].extend(event.token_ids)  # type: ignore[attr-defined]

    def _fill(self) -> None:
        while (batch := self._engine.schedule(self._session, time.monotonic())) is not None:
            self._device.submit(step_batch(batch))


async def serve(settings: ExecutorSettings) -> None:
    """Run the workloads that standard input names until it ends."""
    worker = Worker()
    runner = await worker.start(plan_load(settings, Stages()))
    try:
        cell, num_ids = DirectCell(worker, runner.limits), min(workloads.NUM_IDS, runner.limits.vocab_size)
        for number in range(_NUM_WARM_UPS):
            await cell.run(workloads.warm_up(number, num_ids=num_ids))
        print(json.dumps({"ready": True}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            workload = workloads.build(**json.loads(line), num_ids=num_ids)
            print(json.dumps(await cell.run(workload)), flush=True)
    finally:
        await worker.stop()


if __name__ == "__main__":
    uvloop.run(serve(load(ExecutorSettings)))
