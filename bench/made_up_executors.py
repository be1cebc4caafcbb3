"""Executors without models, behind real gRPC: made_up_executors.py NUM [--step-ms MS] [--rows ROWS].

One process serves them all, each on a port of its own. Every step is answered well, MS after the one before it; 0: at
once. Once all listen, a line of JSON on stderr says so, with their addresses.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import deque
from typing import Any

import uvloop
from scheduler_cell import BLOCK_SIZE, VOCAB_SIZE, MadeUpExecutor

from octavo.internal.executor.v1 import executor_pb2, executor_pb2_grpc
from octavo.rpc.server import RpcServer

MODEL = "made-up"
REVISION = "r1"
BLOCKS_PER_ROW = 64
LONGEST = BLOCKS_PER_ROW * BLOCK_SIZE
READY = "made-up executors listening"
_SIGN_OF_LIFE = 0.25


class MadeUpExecutorService(executor_pb2_grpc.ExecutorServiceServicer):
    """Serves one session after the other. step_seconds: how long its device takes for a step."""

    def __init__(self, number: int, rows: int, step_seconds: float) -> None:
        self._welcome = executor_pb2.Welcome(
            incarnation=f"{number:032x}",
            cell="default",
            model_name=MODEL,
            model_revision=REVISION,
            tokenizer_hash="t",
            fingerprint="f",
            block_size=BLOCK_SIZE,
            num_blocks=1 + (rows + 1) * BLOCKS_PER_ROW,
            max_num_seqs=rows,
            max_num_batched_tokens=rows + 512,
            max_model_len=LONGEST,
            vocab_size=VOCAB_SIZE,
        )
        self._step_seconds = step_seconds

    async def Execute(self, request_iterator: Any, context: Any) -> None:  # noqa: ARG002, N802 - the contract's name
        """Run a session until the scheduler ends it."""
        await context.write(executor_pb2.ExecuteResponse(welcome=self._welcome))
        begin = (await context.read()).begin
        await context.write(executor_pb2.ExecuteResponse(ready=executor_pb2.Ready(session=begin.session)))
        session = _Session(context, self._step_seconds)
        tasks = [asyncio.ensure_future(work) for work in (session.run_steps(), session.give_signs(), session.write())]
        try:
            while (frame := await context.read()).WhichOneof("frame") == "step_batch":
                session.take(frame.step_batch)
        except AttributeError:
            return  # grpc's end of the stream is no message
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _Session:
    def __init__(self, context: Any, step_seconds: float) -> None:
        self._context = context
        self._step_seconds = step_seconds
        self._device = MadeUpExecutor()
        self._steps: deque[executor_pb2.StepBatch] = deque()
        self._came = asyncio.Event()
        self._answers: asyncio.Queue[executor_pb2.ExecuteResponse] = asyncio.Queue()
        self._num_steps = 0

    def take(self, batch: executor_pb2.StepBatch) -> None:
        self._steps.append(batch)
        self._came.set()

    async def run_steps(self) -> None:
        """Answer the steps in order, each so long after its coming, or after the answer before it."""
        loop = asyncio.get_running_loop()
        done_at = 0.0
        while True:
            while not self._steps:
                self._came.clear()
                await self._came.wait()
            done_at = max(done_at, loop.time()) + self._step_seconds
            if self._step_seconds:
                await asyncio.sleep(done_at - loop.time())
            self._num_steps += 1
            self._answers.put_nowait(self._device.answer(self._steps.popleft()))

    async def give_signs(self) -> None:
        """Tell of the device, as often as an executor does."""
        while True:
            progress = executor_pb2.Progress(num_ticks=self._num_steps)
            self._answers.put_nowait(executor_pb2.ExecuteResponse(progress=progress))
            await asyncio.sleep(_SIGN_OF_LIFE)

    async def write(self) -> None:
        """Write what there is, for ever."""
        while True:
            await self._context.write(await self._answers.get())


async def serve(num_executors: int, rows: int, step_seconds: float) -> None:
    """Serve until the process is ended."""
    servers = []
    for number in range(1, num_executors + 1):
        server = RpcServer("127.0.0.1", 0)
        executor = MadeUpExecutorService(number, rows, step_seconds)
        executor_pb2_grpc.add_ExecutorServiceServicer_to_server(executor, server.server)
        await server.start("octavo.internal.executor.v1.ExecutorService")
        servers.append(server)
    addresses = [f"127.0.0.1:{server.port}" for server in servers]
    print(json.dumps({"message": READY, "addresses": addresses}), file=sys.stderr, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("num", type=int)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--rows", type=int, default=64)
    args = parser.parse_args()
    uvloop.run(serve(args.num, args.rows, args.step_ms / 1e3))
