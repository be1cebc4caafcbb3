"""Services as processes: how they end, what their end means to clients, and what they leave behind."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import grpc
import grpc.aio
import psutil
import pytest
from reference import Reference
from stack import TIMEOUT, ProcessStack, get_load, processes, wait_idle, wait_serving
from stack_client import generate, generate_all, read_stream, request_for

from octavo.models.prepared import PreparedModel
from octavo.rpc.channel import open_channel
from octavo.rpc.errors import from_rpc_error
from octavo.v1 import inference_pb2_grpc

PROMPTS = [[5 + index, 6, 7] for index in range(10)]
LONG = 100


class LiveStreams:
    """Ten streams, each with a token already."""

    def __init__(self, stack: ProcessStack) -> None:
        self._stack = stack

    async def __aenter__(self) -> list[asyncio.Task[object]]:
        self._channel = open_channel(self._stack.gateway_address)
        stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        first_tokens = []
        tasks: list[asyncio.Task[object]] = []
        for prompt in PROMPTS:
            has_token = asyncio.Event()
            first_tokens.append(has_token.wait())
            call = stub.Generate(request_for(prompt, LONG, ignore_eos=True))
            tasks.append(asyncio.create_task(self._read(call, has_token)))
        async with asyncio.timeout(TIMEOUT):
            await asyncio.gather(*first_tokens)
        return tasks

    async def __aexit__(self, *error: object) -> None:
        await self._channel.close()

    async def _read(self, call: grpc.aio.UnaryStreamCall, has_token: asyncio.Event) -> object:  # type: ignore[type-arg]
        async def noticed():  # type: ignore[no-untyped-def]
            async for response in call:
                if response.HasField("delta"):
                    has_token.set()
                yield response

        return await read_stream(noticed())  # type: ignore[no-untyped-call]


@pytest.mark.asyncio
async def test_sigterm_of_the_gateway_ends_each_stream_with_a_status(tiny_model: PreparedModel, tmp_path: Path) -> None:
    """F3: ten live streams each end UNAVAILABLE with a reason; the gateway exits 0; the scheduler frees everything."""
    async with processes(tiny_model, tmp_path) as stack:
        async with LiveStreams(stack) as tasks:
            stack.signal("gateway", signal.SIGTERM)
            async with asyncio.timeout(TIMEOUT):
                results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            assert isinstance(result, grpc.aio.AioRpcError)
            error = from_rpc_error(result)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
        assert await stack.wait_exit("gateway") == 0
        await wait_idle(stack)
        assert stack.stop_all() == {"gateway": 0, "scheduler": 0, "executor-0": 0}


@pytest.mark.asyncio
async def test_a_killed_scheduler_is_a_pause(tiny_model: PreparedModel, reference: Reference, tmp_path: Path) -> None:
    """The gateway holds the records: after kill -9 and a new start every stream goes on, token for token."""
    async with processes(tiny_model, tmp_path) as stack:
        async with LiveStreams(stack) as tasks:
            stack.signal("scheduler", signal.SIGKILL)
            await stack.wait_exit("scheduler")
            stack.start("scheduler")
            async with asyncio.timeout(TIMEOUT):
                outputs = await asyncio.gather(*tasks)
        await _assert_undisturbed(outputs, reference)
        await wait_idle(stack)


@pytest.mark.asyncio
async def test_a_killed_executor_is_a_pause(tiny_model: PreparedModel, reference: Reference, tmp_path: Path) -> None:
    """One of two executors dies by kill -9: its sequences go on at the other, token for token."""
    async with processes(tiny_model, tmp_path, num_executors=2) as stack:
        async with asyncio.timeout(TIMEOUT):
            while len((await get_load(stack)).executors) < 2:
                await asyncio.sleep(0.01)
        async with LiveStreams(stack) as tasks:
            stack.signal("executor-0", signal.SIGKILL)
            await stack.wait_exit("executor-0")
            async with asyncio.timeout(TIMEOUT):
                outputs = await asyncio.gather(*tasks)
        await _assert_undisturbed(outputs, reference)
        stack.start("executor-0")
        async with asyncio.timeout(TIMEOUT):
            while len((await wait_idle(stack)).executors) < 2:
                await asyncio.sleep(0.01)


@pytest.mark.asyncio
async def test_nothing_is_left_behind(shared_processes: ProcessStack) -> None:
    """After 64 streams and 64 cancelled ones no service has a thread or descriptor more than after the first 64."""
    stack = shared_processes
    await wait_serving(stack.gateway_address)

    async def busy() -> None:
        requests = [request_for([3 + index, 4], 20, ignore_eos=True) for index in range(64)]
        await generate_all(stack, requests)
        async with open_channel(stack.gateway_address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            calls = [stub.Generate(request) for request in requests]
            await asyncio.gather(*(call.read() for call in calls))
            for call in calls:
                call.cancel()
        await wait_idle(stack)

    def held() -> dict[str, tuple[int, int]]:
        found = {name: psutil.Process(process.pid) for name, process in stack.processes.items()}
        return {name: (process.num_threads(), process.num_fds()) for name, process in found.items()}

    await busy()
    async with asyncio.timeout(TIMEOUT):
        before = held()
        await busy()
        # The sockets of closed connections go when grpc's own threads get to it.
        while any(now > then for name in before for now, then in zip(held()[name], before[name], strict=True)):
            await asyncio.sleep(0.05)


@pytest.mark.asyncio
async def test_without_an_executor_new_requests_are_told_when_to_come_back(
    tiny_model: PreparedModel, tmp_path: Path
) -> None:
    """No executor: NOT_SERVING, and UNAVAILABLE with a retry delay at once; one that starts later is taken up."""
    async with processes(tiny_model, tmp_path) as stack:
        stack.signal("executor-0", signal.SIGTERM)
        assert await stack.wait_exit("executor-0") == 0
        await wait_serving(stack.gateway_address, serving=False)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await generate(stack, request_for([5], 5))
        error = from_rpc_error(raised.value)
        assert error.code == grpc.StatusCode.UNAVAILABLE
        assert error.retry_delay
        stack.start("executor-0")
        await wait_serving(stack.gateway_address)
        assert (await generate(stack, request_for([5], 5, ignore_eos=True))).usage.completion_tokens == 5


async def _assert_undisturbed(outputs: list[object], reference: Reference) -> None:
    generation = {"eos_token_id": None}
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = output.choices[0].token_ids  # type: ignore[attr-defined]
        assert tokens == reference.greedy(prompt, LONG, **generation)
