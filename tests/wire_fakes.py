"""A fake executor and a scripted gateway on the real contracts, and a scheduler between them, all in one process.

The fake executor's model is a pure function of a sequence's tokens, so every test can say what the output must be.
Its KV memory is a dictionary of slots: a row whose earlier slots do not hold its own tokens fails the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from octavo.internal.executor.v1 import executor_pb2, executor_pb2_grpc, sequence_pb2
from octavo.internal.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from octavo.rpc.channel import open_channel
from octavo.settings import SchedulerSettings
from scheduler_svc.server import SchedulerServer

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
    """An executor whose steps can be held and whose streams can be broken. Sizes are small so that they bind."""

    def __init__(self, **welcome: Any) -> None:
        super().__init__()
        values: dict[str, Any] = {
            "incarnation": secrets.token_hex(16),
            "cell": "default",
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
        runner = asyncio.ensure_future(self._run_steps(unanswered, begin.session, context))
        try:
            await context.write(executor_pb2.ExecuteResponse(ready=executor_pb2.Ready(session=begin.session)))
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
            runner.cancel()
            await asyncio.gather(runner, return_exceptions=True)
            self.changed()

    async def _run_steps(self, batches: asyncio.Queue[executor_pb2.StepBatch], session: int, context: Any) -> None:
        stays: dict[int, _Stay] = {}
        slots: dict[int, tuple[int, int]] = {}
        while True:
            batch = await batches.get()
            if self._permits is not None:
                await self._permits.acquire()
            result = executor_pb2.StepResult(session=session, step=batch.step)
            self._run(batch, stays, slots, result)
            self.num_steps += 1
            self.num_rows += len(batch.handles)
            await context.write(executor_pb2.ExecuteResponse(step_result=result))
            self.changed()

    def _run(
        self,
        batch: executor_pb2.StepBatch,
        stays: dict[int, _Stay],
        slots: dict[int, tuple[int, int]],
        result: executor_pb2.StepResult,
    ) -> None:
        for handle in batch.released_handles:
            stays.pop(handle, None)
        for new in batch.new_sequences:
            stays[new.handle] = _Stay(new, list(new.token_ids))
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
            self._compute(stay, scheduled, slots)
            result.statuses.append(executor_pb2.ROW_STATUS_OK)
            result.num_sampled_tokens.append(int(stay.num_computed == len(stay.tokens)))
            if stay.num_computed == len(stay.tokens):
                self._sample(stay, row, result)

    def _compute(self, stay: _Stay, scheduled: int, slots: dict[int, tuple[int, int]]) -> None:
        size = self.welcome.block_size
        self._expect(0 not in stay.blocks, "the null block was given away")
        for position in range(stay.num_computed + scheduled):
            slot = stay.blocks[position // size] * size + position % size
            if position >= stay.num_computed:
                slots[slot] = (stay.new.handle, position)
            self._expect(slots.get(slot) == (stay.new.handle, position), f"slot {slot} is not its own")
        stay.num_computed += scheduled
        self.num_tokens += scheduled

    def _sample(self, stay: _Stay, row: int, result: executor_pb2.StepResult) -> None:
        sampling, stopping = stay.new.sampling, stay.new.stopping
        token = next_token(stay.tokens, stay.new.choice, sampling.seed)
        stay.tokens.append(token)
        result.token_ids.append(token)
        if sampling.HasField("top_logprobs"):
            columns = sequence_pb2.TokenLogprobColumns(sampled=b"%04d" % token)
            result.logprobs.append(executor_pb2.RowLogprobs(row=row, columns=columns))
        num_output = len(stay.tokens) - stay.new.num_prompt_tokens
        stopped = token in stopping.stop_token_ids and num_output > stopping.min_tokens
        stay.ended = stopped or num_output >= stopping.max_tokens

    def _expect(self, condition: bool, fault: str) -> None:
        if not condition:
            self.faults.append(fault)


@dataclass
class Outcome:
    """What a gateway was told of one request."""

    accepted: int = 0
    rejected: scheduler_pb2.RequestError | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[bytes]] = field(default_factory=dict)
    ends: dict[int, scheduler_pb2.ChoiceEnd] = field(default_factory=dict)
    finished: list[scheduler_pb2.Finished] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return bool(self.finished) or self.rejected is not None


class FakeGateway(Watched):
    """A gateway that applies what it is told and faults on any gap, change or second ending.

    Acknowledges each output frame unless `acknowledges` is False. `reads` False leaves frames unread.
    """

    def __init__(self, port: int, incarnation: str | None = None) -> None:
        super().__init__()
        self.incarnation = incarnation or secrets.token_hex(16)
        self.acknowledges = True
        self.frames: list[scheduler_pb2.AttachResponse] = []
        self.outcomes: dict[int, Outcome] = {}
        self.faults: list[str] = []
        self.highest_sequence = 0
        self.redelivered = 0
        self._channel = open_channel(f"127.0.0.1:{port}")
        self.stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        self._call: Any = None
        self._writing = asyncio.Lock()
        self.reader: asyncio.Future[grpc.aio.AioRpcError | None] | None = None

    async def attach(
        self, live: Iterable[int] = (), *, cell: str = "default", highest_term: int = 0, read: bool = True
    ) -> scheduler_pb2.Welcome:
        """Open a stream, say Hello, and read on in the background after Welcome."""
        self._call = self.stub.Attach()
        hello = scheduler_pb2.Hello(
            incarnation=self.incarnation, cell=cell, highest_term=highest_term, live_requests=live
        )
        await self.send(hello=hello)
        async with asyncio.timeout(TIMEOUT):
            frame = await self._call.read()
        assert frame is not grpc.aio.EOF
        assert frame.WhichOneof("frame") == "welcome"
        if read:
            self.read_on()
        return frame.welcome

    def read_on(self) -> None:
        """Read in the background until the stream ends."""
        self.reader = asyncio.ensure_future(self._read(self._call))

    async def send(self, **frame: Any) -> None:
        # grpc allows one write at a time on a stream.
        async with self._writing:
            await self._call.write(scheduler_pb2.AttachRequest(**frame))

    async def submit(self, counter: int, prompt: Sequence[int], max_tokens: int, **options: Any) -> Outcome:
        """Submit a request; options as in `submit_message`."""
        self.outcomes.setdefault(counter, Outcome())
        await self.send(submit=submit_message(counter, prompt, max_tokens, **options))
        return self.outcomes[counter]

    async def cancel(self, counter: int, **options: Any) -> None:
        cancel = scheduler_pb2.Cancel(request=counter, reason=scheduler_pb2.CANCEL_REASON_CLIENT, **options)
        await self.send(cancel=cancel)

    async def over(self, *counters: int) -> None:
        """Wait until these requests have ended."""
        for counter in counters:
            await self.until(lambda: self.outcomes[counter].is_over)  # noqa: B023 - it ends within the turn

    async def ended(self) -> grpc.aio.AioRpcError | None:
        """Wait until the newest stream has ended; returns its error."""
        assert self.reader is not None
        async with asyncio.timeout(TIMEOUT):
            return await self.reader

    async def break_stream(self) -> None:
        """Cancel the stream, as a broken connection does."""
        self._call.cancel()
        if self.reader is not None:
            await asyncio.gather(self.reader, return_exceptions=True)

    async def half_close(self) -> None:
        await self._call.done_writing()

    async def close(self) -> None:
        if self._call is not None:
            await self.break_stream()
        await self._channel.close()

    async def load(self) -> scheduler_pb2.GetLoadResponse:
        response: scheduler_pb2.GetLoadResponse = await self.stub.GetLoad(scheduler_pb2.GetLoadRequest())
        return response

    async def until_load(
        self, predicate: Callable[[scheduler_pb2.GetLoadResponse], bool]
    ) -> scheduler_pb2.GetLoadResponse:
        """Ask for the load until the predicate holds."""
        async with asyncio.timeout(TIMEOUT):
            while not predicate(load := await self.load()):
                pass
        return load

    async def _read(self, call: Any) -> grpc.aio.AioRpcError | None:
        try:
            while (frame := await call.read()) is not grpc.aio.EOF:
                self.frames.append(frame)
                self._apply(frame)
                self.changed()
                sequence = max(frame.step_outputs.sequence, frame.finished.sequence)
                if sequence and self.acknowledges:
                    async with self._writing:
                        await call.write(scheduler_pb2.AttachRequest(ack=scheduler_pb2.Ack(sequence=sequence)))
        except grpc.aio.AioRpcError as error:
            return error
        except asyncio.InvalidStateError:  # an acknowledgement after the end
            return grpc.aio.AioRpcError(await call.code(), grpc.aio.Metadata(), grpc.aio.Metadata())
        finally:
            self.changed()
        return None

    def _apply(self, frame: scheduler_pb2.AttachResponse) -> None:
        match frame.WhichOneof("frame"):
            case "accepted":
                self.outcomes[frame.accepted.request].accepted += 1
            case "rejected":
                self.outcomes[frame.rejected.request].rejected = frame.rejected.error
            case "step_outputs":
                if self._is_new(frame.step_outputs.sequence):
                    self._apply_outputs(frame.step_outputs.outputs)
            case "finished":
                if self._is_new(frame.finished.sequence):
                    self.outcomes[frame.finished.request].finished.append(frame.finished)

    def _is_new(self, sequence: int) -> bool:
        if sequence <= self.highest_sequence:
            self.redelivered += 1
            return False
        if sequence != self.highest_sequence + 1:
            self.faults.append(f"frame {sequence} after {self.highest_sequence}")
        self.highest_sequence = sequence
        return True

    def _apply_outputs(self, outputs: Iterable[scheduler_pb2.ChoiceOutput]) -> None:
        seen = set()
        for output in outputs:
            key = (output.request, output.choice)
            outcome = self.outcomes[output.request]
            tokens = outcome.tokens.setdefault(output.choice, [])
            if key in seen or outcome.finished or output.choice in outcome.ends:
                self.faults.append(f"{key}: twice in a frame, or after its end")
            seen.add(key)
            if output.first_token_index > len(tokens):
                self.faults.append(f"{key}: a gap, {output.first_token_index} after {len(tokens)}")
            known = tokens[output.first_token_index :]
            if any(old != new for old, new in zip(known, output.token_ids, strict=False)):
                self.faults.append(f"{key}: a token changed")
            tokens += output.token_ids[len(known) :]
            if output.HasField("logprobs"):
                outcome.logprobs.setdefault(output.choice, []).append(output.logprobs.sampled)
            if output.HasField("end"):
                outcome.ends[output.choice] = output.end


def submit_message(
    counter: int,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    n: int = 1,
    seed: int = 0,
    stop: Iterable[int] = (),
    model: str = MODEL,
    revision: str = REVISION,
    committed: Sequence[int] = (),
    **fields: Any,
) -> scheduler_pb2.Submit:
    """A Submit of a new request, or with `committed` tokens of its first choice of a resumed one."""
    return scheduler_pb2.Submit(
        request=counter,
        model=model,
        model_revision=revision,
        prompt_token_ids=prompt,
        sampling=sequence_pb2.SamplingParams(seed=seed, top_p=1, repetition_penalty=1),
        stopping=sequence_pb2.StoppingParams(max_tokens=max_tokens, stop_token_ids=sorted(stop)),
        choices=[scheduler_pb2.ChoiceRecord(token_ids=() if index else committed) for index in range(n)],
        **fields,
    )


class RunningScheduler:
    """A scheduler at work in this process, and the gateways that tests attach to it."""

    def __init__(self, server: SchedulerServer) -> None:
        self.server = server
        self.expected_code = 0
        self.gateways: list[FakeGateway] = []
        self._stop = asyncio.Event()
        self._task = asyncio.ensure_future(server.run(self._stop.wait()))

    @property
    def port(self) -> int:
        return self.server.port

    async def gateway(self, *, attach: bool = True, incarnation: str | None = None) -> FakeGateway:
        """Return a new gateway, attached."""
        gateway = FakeGateway(self.port, incarnation)
        self.gateways.append(gateway)
        if attach:
            await gateway.attach()
        return gateway

    async def ready_gateway(self, num_executors: int = 1) -> FakeGateway:
        """Return a new gateway once this many executors are ready."""
        gateway = await self.gateway()
        await gateway.until_load(lambda load: len(load.executors) == num_executors)
        return gateway

    async def exit_code(self) -> int:
        """Wait for the end."""
        async with asyncio.timeout(TIMEOUT):
            return await asyncio.shield(self._task)

    async def stop(self) -> int:
        """Stop as a signal does."""
        self._stop.set()
        return await self.exit_code()


@contextlib.asynccontextmanager
async def running_scheduler(*executors: FakeExecutor, **options: Any) -> AsyncIterator[RunningScheduler]:
    """Run a scheduler for these executors, which are started; check at the end that nobody found a fault.

    options: those of SchedulerSettings, and the keyword arguments of SchedulerServer.
    """
    names = ("dial", "resolver", "start_ns", "engine", "output_limit")
    arguments = {name: options.pop(name) for name in names if name in options}
    for executor in executors:
        await executor.start()
    # Without an executor: a port that nobody listens on.
    addresses = ",".join(executor.address for executor in executors) or "127.0.0.1:1"
    values: dict[str, Any] = {"executors": addresses, "port": 0, "check_invariants": True, "resolve_interval": 0.05}
    server = SchedulerServer(SchedulerSettings(**(values | options)), **arguments)
    await server.start()
    scheduler = RunningScheduler(server)
    try:
        yield scheduler
        for party in (*executors, *scheduler.gateways):
            assert party.faults == []
    finally:
        code = await scheduler.stop()
        for gateway in scheduler.gateways:
            await gateway.close()
        for executor in executors:
            await executor.stop()
    assert code == scheduler.expected_code
