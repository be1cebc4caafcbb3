"""A served executor over a fake model, a peer that speaks the contract with it, and frames to send."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from fakes_executor import RecallModel, make_limits, make_runner

from executor_svc.batch import ExecutorInfo, StepBatch
from executor_svc.servicer import ExecutorService
from executor_svc.worker import Session, SessionEvent, Worker
from octavo.internal.executor.v1 import executor_pb2 as pb
from octavo.internal.executor.v1 import executor_pb2_grpc, sequence_pb2
from octavo.rpc.channel import open_channel
from octavo.rpc.errors import ServiceError, from_rpc_error
from octavo.rpc.server import RpcServer

TIMEOUT = 10.0
INFO = ExecutorInfo("ab" * 16, "cell-a", "tiny", "rev", "tok", "finger", make_limits())


class Peer:
    """A scheduler's end of one Execute stream."""

    def __init__(self, stub: executor_pb2_grpc.ExecutorServiceStub) -> None:
        self.call = stub.Execute()

    async def read(self) -> pb.ExecuteResponse:
        """The next frame; signs of life are passed over."""
        while True:
            frame = await asyncio.wait_for(self.call.read(), TIMEOUT)
            assert isinstance(frame, pb.ExecuteResponse), f"the stream ended: {await self.call.code()}"
            if frame.WhichOneof("frame") != "progress":
                return frame

    async def write(self, **frame: Any) -> None:
        await asyncio.wait_for(self.call.write(pb.ExecuteRequest(**frame)), TIMEOUT)

    async def begin(self, term: int, session: int) -> None:
        """Open a session, from Welcome to Ready."""
        assert (await self.read()).WhichOneof("frame") == "welcome"
        await self.write(begin=pb.Begin(term=term, session=session))
        assert (await self.read()).ready.session == session

    async def step(self, batch: pb.StepBatch) -> pb.StepResult:
        await self.write(step_batch=batch)
        return (await self.read()).step_result

    async def end(self) -> ServiceError:
        """The error that the stream ends with; frames that come before it are read."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self._drain()
        return from_rpc_error(caught.value)

    async def _drain(self) -> None:
        while await asyncio.wait_for(self.call.read(), TIMEOUT) is not grpc.aio.EOF:
            pass


class WatchedWorker(Worker):
    """A worker that tells when a session is opened and which steps were handed over."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = asyncio.Event()
        self.submitted: asyncio.Queue[int] = asyncio.Queue()

    def open(self, number: int, deliver: Callable[[SessionEvent], None]) -> Session:
        """See Worker."""
        session = super().open(number, deliver)
        submit = session.submit

        def watched(batch: StepBatch) -> None:
            submit(batch)
            self.submitted.put_nowait(batch.step)

        session.submit = watched  # type: ignore[method-assign]
        self.opened.set()
        return session


class Stack:
    """A served executor over RecallModel."""

    def __init__(self) -> None:
        self.before_forward: Callable[[int], None] = lambda number: None
        self.model = RecallModel(61, before_forward=lambda number: self.before_forward(number))
        self.worker = WatchedWorker()
        self.servicer = ExecutorService(INFO, self.worker)
        self.rpc = RpcServer("127.0.0.1", 0)
        self.stub: executor_pb2_grpc.ExecutorServiceStub

    def peer(self) -> Peer:
        return Peer(self.stub)


@contextlib.asynccontextmanager
async def running_executor(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Stack]:
    """The stack; at its end no task and no thread is left, and no handler has failed in an unforeseen way."""
    before = set(asyncio.all_tasks())
    stack = Stack()
    await stack.worker.start(lambda: make_runner(make_limits(), stack.model))
    executor_pb2_grpc.add_ExecutorServiceServicer_to_server(stack.servicer, stack.rpc.server)
    await stack.rpc.start("octavo.internal.executor.v1.ExecutorService")
    async with open_channel(f"127.0.0.1:{stack.rpc.port}") as channel:
        stack.stub = executor_pb2_grpc.ExecutorServiceStub(channel)
        yield stack
    stack.servicer.end_streams(ServiceError(grpc.StatusCode.UNAVAILABLE, "STOPPING", "stopping"))
    await stack.rpc.stop(1.0)
    await stack.worker.stop()
    left = {task.get_coro().__qualname__ for task in set(asyncio.all_tasks()) - before}  # type: ignore[union-attr]
    assert not {name for name in left if "_Stream" in name or "Execute" in name}
    assert "device" not in {thread.name for thread in threading.enumerate()}
    assert not [record for record in caplog.get_records("call") if record.name == "octavo.rpc.interceptors"]


def new_sequence(handle: int, token_ids: list[int], max_tokens: int = 8, **sampling: Any) -> sequence_pb2.NewSequence:
    """A greedy sequence, its prompt whole; `sampling` changes that."""
    defaults = {"top_p": 1.0, "repetition_penalty": 1.0}
    return pb.NewSequence(
        handle=handle,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling=sequence_pb2.SamplingParams(**{**defaults, **sampling}),
        stopping=sequence_pb2.StoppingParams(max_tokens=max_tokens),
    )


def first_step(session: int = 7, **changes: Any) -> pb.StepBatch:
    """Step 1: sequence 1, three tokens, in block 1."""
    fields: dict[str, Any] = {
        "session": session,
        "step": 1,
        "new_sequences": [new_sequence(1, [9, 8, 7])],
        "handles": [1],
        "num_scheduled_tokens": [3],
        "num_computed_tokens": [0],
        "num_new_blocks": [1],
        "new_blocks": [1],
    }
    return pb.StepBatch(**{**fields, **changes})


def next_step(step: int, computed: int, session: int = 7) -> pb.StepBatch:
    """One more token of sequence 1."""
    return pb.StepBatch(
        session=session,
        step=step,
        handles=[1],
        num_scheduled_tokens=[1],
        num_computed_tokens=[computed],
        num_new_blocks=[1 if computed == 4 else 0],
        new_blocks=[2] if computed == 4 else [],
    )
