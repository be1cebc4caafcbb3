"""A scheduler's insides between an executor and gateways that are made up, for bench/scheduler.py."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from time import thread_time
from typing import Any

from prometheus_client import CollectorRegistry

from octavo.internal.executor.v1 import executor_pb2
from octavo.internal.executor.v1.sequence_pb2 import SamplingParams
from octavo.internal.scheduler.v1 import scheduler_pb2
from scheduler_svc.batch import BatchResult, Event, ExecutorSpec, ScheduledBatch
from scheduler_svc.convert import accepted_frame, batch_result, request_record, step_batch_frame
from scheduler_svc.engine import Engine
from scheduler_svc.engine_loop import EngineLoop
from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.output_streams import OutputStreams
from scheduler_svc.policies.registry import load_policy

STAGES = ("parse result", "apply", "build", "publish", "serialize", "log, metrics, loop")
GATEWAYS = ("a" * 32, "b" * 32)
HOPS = ("step batches", "step results", "step outputs")
"""What goes to an executor, what comes from it, and what goes to gateways."""
BLOCK_SIZE = 16
VOCAB_SIZE = 50_000
DEPTH = 2
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
        return self.answer(executor_pb2.ExecuteRequest.FromString(data).step_batch).SerializeToString()

    def answer(self, batch: executor_pb2.StepBatch) -> executor_pb2.ExecuteResponse:
        """Return the answer to a step."""
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
        return executor_pb2.ExecuteResponse(step_result=result)


@dataclass
class Step:
    """What one step took, in CPU seconds, and how many rows its result had."""

    num_rows: int
    seconds: float
    stages: dict[str, float] = field(default_factory=dict)


class Cell:
    """A scheduler's insides with a made-up executor; `step` goes once round. Messages are counted, by hop."""

    def __init__(
        self,
        loop: EngineLoop,
        engine: _TimedEngine,
        outputs: _TimedOutputs,
        spec: ExecutorSpec,
        gateways: Sequence[str] = GATEWAYS,
    ) -> None:
        self.engine = engine
        self.executor = MadeUpExecutor()
        self.loop = self._loop = loop
        self.spec = spec
        self._outputs = outputs
        self._link = _Link()
        self._counters = itertools.count(1)
        self._gateways = gateways
        self._streams = [outputs.open(gateway) for gateway in gateways]
        self._session = loop.join(spec, self._link)
        self._answers: deque[bytes] = deque()
        self._watch = Stopwatch()
        self.num_messages = dict.fromkeys(HOPS, 0)
        self.num_bytes = dict.fromkeys(HOPS, 0)

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
        num_cached_tokens = self._loop.submit(
            request_record(self._gateways[counter % len(self._gateways)], frame.submit)
        )
        accepted_frame(counter, num_cached_tokens).SerializeToString()
        self._watch.enter(before)

    def submit_seconds(self) -> float:
        """CPU seconds of the requests taken in since the last step."""
        return self._watch.seconds.get("submit", 0.0)

    async def step(self) -> Step:
        """Answer the oldest step, and see to it that as many are in flight as before."""
        if not self._answers:
            await self._settle()
            self._send()
        if not self._answers:
            raise SystemExit("the scheduler has nothing to do")
        data, watch = self._answers.popleft(), Stopwatch()
        self._count("step results", data)
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
        for _ in range(2 + DEPTH):
            await asyncio.sleep(0)

    def _write_gateways(self) -> None:
        for stream in self._streams:
            self._watch.enter("publish")
            while (frame := stream.next_frame()) is not None:
                self._watch.enter("serialize")
                data = frame.SerializeToString()
                self._watch.enter(None)
                self._count("step outputs", data)
                self._watch.enter("publish")
            stream.acknowledge(stream.next_sequence - 1)

    def _count(self, hop: str, data: bytes) -> None:
        self.num_messages[hop] += 1
        self.num_bytes[hop] += len(data)

    def _send(self) -> None:
        while self._link.batches:
            before = self._watch.enter("serialize")
            data = step_batch_frame(self._link.batches.popleft(), 1).SerializeToString()
            self._watch.enter(None)
            self._count("step batches", data)
            self._answers.append(self.executor.run(data))
            self._watch.enter(before)


@contextlib.asynccontextmanager
async def open_cell(
    max_num_seqs: int,
    *,
    num_blocks: int,
    budget: int | None = None,
    policy: str = "fcfs",
    gateways: Sequence[str] = GATEWAYS,
) -> AsyncIterator[Cell]:
    """Make a cell of one executor. budget: tokens of a step, by default enough for two prompts beside the decodes."""
    registry = CollectorRegistry()
    engine = _TimedEngine(load_policy(policy), DEPTH)
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
        yield Cell(loop, engine, outputs, spec, gateways)
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
