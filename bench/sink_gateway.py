"""A gateway that keeps a scheduler busy and throws away what it gets, for bench/dataplane.py."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator

import grpc.aio
from made_up_executors import LONGEST, MODEL, REVISION, VOCAB_SIZE

from octavo.internal.executor.v1.sequence_pb2 import SamplingParams
from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.rpc.channel import open_channel
from octavo.rpc.seal import Damaged, sealed_stream

_PATH = "/octavo.internal.scheduler.v1.SchedulerService/Attach"
PROMPT_TOKENS = 128
_ACK_EVERY = 16
"""Frames, as a gateway does (gateway/attach_client.py; this folder's gateway.py hides that package here)."""
_Call = grpc.aio.StreamStreamCall[scheduler_pb2.AttachRequest, scheduler_pb2.AttachResponse]


class SinkGateway:
    """Keeps so many requests live: where one ends, the next is submitted. It acknowledges as a gateway does.

    Outputs are between one and two times `num_tokens` long, so that few end in one step.
    """

    def __init__(self, number: int, num_live: int, num_tokens: int) -> None:
        if PROMPT_TOKENS + 2 * num_tokens > LONGEST:
            raise ValueError(f"num_tokens must be at most {(LONGEST - PROMPT_TOKENS) // 2}, got {num_tokens}")
        self.num_tokens = 0
        self.num_frames = 0
        self.num_bytes = 0
        self.num_ended = 0
        self._number = number
        self._num_live = num_live
        self._length = num_tokens
        self._counters = itertools.count(1)
        self._outbox: asyncio.Queue[scheduler_pb2.AttachRequest] = asyncio.Queue()
        self._acknowledged = 0
        self._has_pool = asyncio.Event()

    async def run(self, call: _Call) -> None:
        """Attach, and serve until cancelled. Raises SystemExit where that ends, or a request ends ill."""
        hello = scheduler_pb2.Hello(incarnation=f"{self._number:032x}", cell="default")
        self._outbox.put_nowait(scheduler_pb2.AttachRequest(hello=hello))
        writing = asyncio.create_task(self._write(call))
        try:
            async for frame in call:
                if isinstance(frame, Damaged):
                    raise SystemExit("a frame of the scheduler was damaged")
                self._take(frame)
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
        raise SystemExit("the scheduler closed the stream")

    async def begin(self) -> None:
        """Submit the first requests, once there is an executor."""
        await self._has_pool.wait()
        for _ in range(self._num_live):
            self._submit()

    def _take(self, frame: scheduler_pb2.AttachResponse) -> None:
        match frame.WhichOneof("frame"):
            case "step_outputs":
                step = frame.step_outputs
                self.num_tokens += len(step.token_ids) + sum(len(output.token_ids) for output in step.outputs)
                self.num_frames += 1
                self.num_bytes += frame.ByteSize()
                if step.sequence - self._acknowledged >= _ACK_EVERY:
                    self._acknowledge(step.sequence)
            case "finished":
                if frame.finished.HasField("error"):
                    raise SystemExit(f"a request failed: {frame.finished.error.message}")
                self.num_ended += 1
                if self._outbox.empty():
                    self._acknowledge(frame.finished.sequence)
                self._submit()
            case "rejected":
                raise SystemExit(f"a request was refused: {frame.rejected.error.message}")
            case "model_pools" if frame.model_pools.pools:
                self._has_pool.set()

    def _acknowledge(self, sequence: int) -> None:
        self._acknowledged = sequence
        self._outbox.put_nowait(scheduler_pb2.AttachRequest(ack=scheduler_pb2.Ack(sequence=sequence)))

    async def _write(self, call: _Call) -> None:
        while True:
            await call.write(await self._outbox.get())

    def _submit(self) -> None:
        counter = next(self._counters)
        submit = scheduler_pb2.Submit(
            request=counter,
            model=MODEL,
            model_revision=REVISION,
            prompt_token_ids=[(counter * 7919 + place * 31) % VOCAB_SIZE for place in range(PROMPT_TOKENS)],
            sampling=SamplingParams(temperature=1.0, seed=counter),
            choices=[scheduler_pb2.ChoiceRecord()],
        )
        submit.stopping.max_tokens = self._length + counter * 7919 % self._length
        submit.stopping.stop_token_ids.append(VOCAB_SIZE)
        self._outbox.put_nowait(scheduler_pb2.AttachRequest(submit=submit))


@contextlib.asynccontextmanager
async def sink_gateways(
    address: str, num_gateways: int, num_live: int, num_tokens: int
) -> AsyncIterator[list[SinkGateway]]:
    """Attach gateways to a scheduler that share num_live requests evenly; end them at the end."""
    shares = [num_live // num_gateways + (number < num_live % num_gateways) for number in range(num_gateways)]
    sinks = [SinkGateway(number, share, num_tokens) for number, share in enumerate(shares, 1)]
    async with contextlib.AsyncExitStack() as stack:
        tasks = []
        for sink in sinks:
            channel = await stack.enter_async_context(open_channel(address))
            attach = sealed_stream(channel, _PATH, scheduler_pb2.AttachResponse)
            tasks.append(asyncio.create_task(sink.run(attach(wait_for_ready=True))))
        stack.push_async_callback(_end, tasks)
        yield sinks


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result
