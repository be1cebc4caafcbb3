"""A fake executor on the real contract.

Its model is a pure function of a sequence's tokens, so every test can say what the output must be. Its KV memory is a
dictionary of slots: a row whose earlier slots do not hold its own tokens is a fault.
"""

from __future__ import annotations

import asyncio
import secrets
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from cell_of_tests import CELL

from octavo.internal.executor.v1 import executor_pb2, executor_pb2_grpc, sequence_pb2
from octavo.rpc.logprobs import pack_floats, pack_ids

TIMEOUT = 20.0
MODEL = "tiny"
REVISION = "a" * 64
VOCABULARY = 1000


def next_token(tokens: Sequence[int], choice: int, seed: int) -> int:
    """The fake model."""
    return zlib.crc32(repr((tokens, choice, seed)).encode()) % VOCABULARY


def expected_tokens(
    prompt: Sequence[int], max_tokens: int, *, choice: int = 0, seed: int = 0, stop: Iterable[int] = ()
) -> list[int]:
    """What the fake model writes after a prompt."""
    tokens = list(prompt)
    stops = set(stop)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens, choice, seed))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


def prompt_logprob_columns(tokens: Sequence[int], first: int, end: int, num_top: int) -> Any:
    """What the fake model says of the prompt tokens [first, end): minus the token, exact in float32; then the ids that
    follow it, with a logprob of minus their place.
    """
    told = tokens[first:end]
    places = range(num_top)
    return sequence_pb2.TokenLogprobColumns(
        num_top=num_top,
        sampled=pack_floats([-float(token) for token in told]),
        top_token_ids=pack_ids([(token + place) % VOCABULARY for token in told for place in places]),
        top_logprobs=pack_floats([-float(place) for _ in told for place in places]),
    )


class Watched:
    """Something that changes and can be waited for."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Event] = set()

    def changed(self) -> None:
        for waiter in self._waiters:
            waiter.set()

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Wait until the predicate holds, looking at every change."""
        waiter = asyncio.Event()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout(TIMEOUT):
                while not predicate():
                    await waiter.wait()
                    waiter.clear()
        finally:
            self._waiters.discard(waiter)


@dataclass
class _Stay:
    new: executor_pb2.NewSequence
    tokens: list[int]
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    ended: bool = False


class FakeExecutor(Watched, executor_pb2_grpc.ExecutorServiceServicer):
    """An executor whose steps can be held and whose streams can be broken. Sizes are small so that they bind.

    welcome: fields of Welcome. logprob_bytes: size of the columns of each token whose logprobs are asked for.
    """

    def __init__(self, *, logprob_bytes: int = 4, **welcome: Any) -> None:
        super().__init__()
        self._logprob_bytes = logprob_bytes
        values: dict[str, Any] = {
            "incarnation": secrets.token_hex(16),
            "cell": CELL,
            "model_name": MODEL,
            "model_revision": REVISION,
            "tokenizer_hash": "t" * 64,
            "fingerprint": "f" * 64,
            "block_size": 4,
            "num_blocks": 129,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 32,
            "max_model_len": 256,
            "vocab_size": VOCABULARY,
        }
        self.welcome = executor_pb2.Welcome(**(values | welcome))
        self.port = 0
        self.num_steps = 0
        self.num_rows = 0
        self.num_tokens = 0
        self.num_sessions = 0
        self.num_dials = 0
        self.num_begins = 0
        self.most_unanswered = 0
        self.faults: list[str] = []
        self.before_begin: Callable[[], None] = lambda: None
        self.batches: list[executor_pb2.StepBatch] = []
        self._permits: asyncio.Semaphore | None = None
        self._owner: asyncio.Event | None = None
        self._streams: set[asyncio.Event] = set()

    # What tests do to it.

    async def start(self) -> FakeExecutor:
        """Listen, on the port it had before if it had one."""
        self._server = grpc.aio.server()
        executor_pb2_grpc.add_ExecutorServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()
        return self

    async def stop(self) -> None:
        """Break the streams and listen no more."""
        self.break_streams()
        await self._server.stop(0)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def break_streams(self) -> None:
        """End every live stream; new ones are served."""
        for stream in self._streams:
            stream.set()

    def hold(self) -> None:
        """Run no step until it is permitted. Called once."""
        assert self._permits is None
        self._permits = asyncio.Semaphore(0)

    def permit(self, steps: int) -> None:
        """Run this many of the steps that are held."""
        assert self._permits is not None
        for _ in range(steps):
            self._permits.release()

    def release(self) -> None:
        """Run all steps again, if they are held."""
        if self._permits is not None:
            self.permit(1_000_000)

    # The contract.

    async def Execute(self, request_iterator: Any, context: Any) -> None:  # noqa: N802
        self.num_dials += 1
        self.changed()
        stream = asyncio.Event()
        self._streams.add(stream)
        broken = asyncio.ensure_future(stream.wait())
        serving = asyncio.ensure_future(self._serve(stream, context))
        try:
            await asyncio.wait((broken, serving), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
                return
        finally:
            self._streams.discard(stream)
            self.changed()
            broken.cancel()
            serving.cancel()
            await asyncio.gather(broken, serving, return_exceptions=True)
        await context.abort(grpc.StatusCode.ABORTED, "broken by the test, or another took the session")

    async def _serve(self, stream: asyncio.Event, context: Any) -> None:
        await context.write(executor_pb2.ExecuteResponse(welcome=self.welcome))
        frame = await context.read()
        if frame is grpc.aio.EOF:
            return
        self.num_begins += 1
        self.before_begin()
        begin = frame.begin
        if begin.term < self.welcome.highest_term:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "lower term")
        if self._owner is not None:
            if begin.term == self.welcome.highest_term:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "in session")
            self._owner.set()
        self._owner = stream
        self.welcome.highest_term = begin.term
        self.num_sessions += 1
        unanswered: asyncio.Queue[executor_pb2.StepBatch] = asyncio.Queue()
        runner: asyncio.Future[None] | None = None
        try:
            await context.write(executor_pb2.ExecuteResponse(ready=executor_pb2.Ready(session=begin.session)))
            # Behind it: grpc takes one write at a time, and a runner may begin with one of its own.
            runner = asyncio.ensure_future(self._run_steps(unanswered, begin.session, context))
            self.changed()
            while (frame := await context.read()) is not grpc.aio.EOF:
                self.batches.append(frame.step_batch)
                unanswered.put_nowait(frame.step_batch)
                self.most_unanswered = max(self.most_unanswered, len(self.batches) - self.num_steps)
                self.changed()
        finally:
            if self._owner is stream:
                self._owner = None
            self.num_steps = len(self.batches)
            if runner is not None:
                runner.cancel()
                await asyncio.gather(runner, return_exceptions=True)
            self.changed()

    async def _run_steps(self, batches: asyncio.Queue[executor_pb2.StepBatch], session: int, context: Any) -> None:
        stays: dict[int, _Stay] = {}
        slots: dict[int, tuple[int, ...]] = {}
        while True:
            batch = await batches.get()
            if self._permits is not None:
                await self._permits.acquire()
            result = executor_pb2.StepResult(session=session, step=batch.step)
            self._run(batch, stays, slots, result)
            self.num_steps += 1
            self.num_rows += len(batch.handles)
            await self._answer(result, context)
            self.changed()

    async def _answer(self, result: executor_pb2.StepResult, context: Any) -> None:
        await context.write(executor_pb2.ExecuteResponse(step_result=result))

    def _run(
        self,
        batch: executor_pb2.StepBatch,
        stays: dict[int, _Stay],
        slots: dict[int, tuple[int, ...]],
        result: executor_pb2.StepResult,
    ) -> None:
        for handle in batch.released_handles:
            stays.pop(handle, None)
        for new in batch.new_sequences:
            stays[new.handle] = _Stay(new, list(new.token_ids), num_computed=new.num_cached_tokens)
        offset = 0
        columns = (batch.handles, batch.num_scheduled_tokens, batch.num_computed_tokens, batch.num_new_blocks)
        self._expect(len(set(map(len, columns))) == 1, "columns of different lengths")
        self._expect(sum(batch.num_scheduled_tokens) <= self.welcome.max_num_batched_tokens, "over the token budget")
        self._expect(len(batch.handles) <= self.welcome.max_num_seqs, "over the row budget")
        for row, (handle, scheduled, computed, num_new_blocks) in enumerate(zip(*columns, strict=True)):
            stay = stays[handle]
            stay.blocks += batch.new_blocks[offset : offset + num_new_blocks]
            offset += num_new_blocks
            result.handles.append(handle)
            if stay.ended:
                result.statuses.append(executor_pb2.ROW_STATUS_SKIPPED)
                result.num_sampled_tokens.append(0)
                continue
            self._expect(computed == stay.num_computed, f"handle {handle} has {stay.num_computed} computed")
            self._tell_prompt(stay, scheduled, row, result)
            self._compute(stay, scheduled, slots)
            result.statuses.append(executor_pb2.ROW_STATUS_OK)
            result.num_sampled_tokens.append(int(stay.num_computed == len(stay.tokens)))
            if stay.num_computed == len(stay.tokens):
                self._sample(stay, row, result)

    def _compute(self, stay: _Stay, scheduled: int, slots: dict[int, tuple[int, ...]]) -> None:
        size = self.welcome.block_size
        self._expect(0 not in stay.blocks, "the null block was given away")
        for position in range(stay.num_computed + scheduled):
            slot = stay.blocks[position // size] * size + position % size
            # KV is a function of the token and all before it: whoever has the same may have computed it.
            content = tuple(stay.tokens[: position + 1])
            if position >= stay.num_computed:
                slots[slot] = content
            self._expect(slots.get(slot) == content, f"slot {slot} holds something else")
        stay.num_computed += scheduled
        self.num_tokens += scheduled

    def _tell_prompt(self, stay: _Stay, scheduled: int, row: int, result: executor_pb2.StepResult) -> None:
        if not stay.new.sampling.HasField("prompt_logprobs"):
            return
        first = stay.num_computed + 1
        end = min(first + scheduled, stay.new.num_prompt_tokens)
        if first < end:
            columns = prompt_logprob_columns(stay.tokens, first, end, stay.new.sampling.prompt_logprobs)
            result.prompt_logprobs.append(
                executor_pb2.RowPromptLogprobs(row=row, first_token_index=first, columns=columns)
            )

    def _sample(self, stay: _Stay, row: int, result: executor_pb2.StepResult) -> None:
        sampling, stopping = stay.new.sampling, stay.new.stopping
        token = next_token(stay.tokens, stay.new.choice, sampling.seed)
        stay.tokens.append(token)
        result.token_ids.append(token)
        if sampling.HasField("top_logprobs"):
            columns = sequence_pb2.TokenLogprobColumns(sampled=(b"%04d" % token).ljust(self._logprob_bytes))
            result.logprobs.append(executor_pb2.RowLogprobs(row=row, columns=columns))
        num_output = len(stay.tokens) - stay.new.num_prompt_tokens
        stopped = token in stopping.stop_token_ids and num_output > stopping.min_tokens
        stay.ended = stopped or num_output >= stopping.max_tokens

    def _expect(self, condition: bool, fault: str) -> None:
        if not condition:
            self.faults.append(fault)
