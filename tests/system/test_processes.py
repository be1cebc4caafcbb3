"""Services as processes: how they end, what their end means to clients, and what they leave behind."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator

import grpc
import grpc.aio
import psutil
import pytest
from reference import Reference
from stack import TIMEOUT, ProcessStack, plan_processes, wait_idle, wait_serving
from stack_client import generate, generate_all, read_stream, request_for

import octavo
from octavo.models.prepared import PreparedModel
from octavo.rpc.channel import open_channel
from octavo.rpc.errors import from_rpc_error
from octavo.v1 import inference_pb2_grpc

PROMPTS = [[5 + index, 6, 7] for index in range(10)]
LONG = 100
ROUNDS = 8
SETTLING_SECONDS = 5.0


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


@pytest.fixture(scope="module")
def cell(tiny_model: PreparedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessStack]:
    """Two executors, a scheduler and a gateway, for tests that end some of them; those there at the end exit with 0."""
    stack = plan_processes(tiny_model, tmp_path_factory.mktemp("logs"), num_executors=2)
    stack.start_all()
    yield stack
    alive = {name for name, process in stack.processes.items() if process.poll() is None}
    assert {name: code for name, code in stack.stop_all().items() if name in alive} == dict.fromkeys(alive, 0)


async def make_whole(stack: ProcessStack) -> None:
    """Start whoever is dead, and wait until everybody serves."""
    for name, process in stack.processes.items():
        if process.poll() is not None:
            stack.start(name)
    await wait_serving(stack.gateway_address)
    await wait_executors(stack, 2)


async def wait_executors(stack: ProcessStack, count: int) -> None:
    """Wait until the scheduler is in session with so many executors, and idle."""
    async with asyncio.timeout(TIMEOUT):
        while len((await wait_idle(stack)).executors) != count:
            await asyncio.sleep(0.01)


@pytest.mark.asyncio
async def test_sigterm_of_the_gateway_ends_each_stream_with_a_status(cell: ProcessStack) -> None:
    """F3: ten live streams each end UNAVAILABLE with a reason; the gateway exits 0; the scheduler frees everything."""
    await make_whole(cell)
    async with LiveStreams(cell) as tasks:
        cell.signal("gateway", signal.SIGTERM)
        async with asyncio.timeout(TIMEOUT):
            results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        assert isinstance(result, grpc.aio.AioRpcError)
        error = from_rpc_error(result)
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
    assert await cell.wait_exit("gateway") == 0
    await wait_idle(cell)


@pytest.mark.asyncio
async def test_a_killed_scheduler_is_a_pause(cell: ProcessStack, reference: Reference) -> None:
    """The gateway holds the records: after kill -9 and a new start every stream goes on, token for token."""
    await make_whole(cell)
    async with LiveStreams(cell) as tasks:
        cell.signal("scheduler", signal.SIGKILL)
        await cell.wait_exit("scheduler")
        cell.start("scheduler")
        async with asyncio.timeout(TIMEOUT):
            outputs = await asyncio.gather(*tasks)
    await _assert_undisturbed(outputs, reference)
    await wait_idle(cell)


@pytest.mark.asyncio
async def test_executors_that_go_and_come(cell: ProcessStack, reference: Reference) -> None:
    """One of two dies by kill -9: its sequences go on at the other, token for token. That one drains: NOT_SERVING, and
    UNAVAILABLE with a retry delay at once for who comes now. One that starts then is taken up.
    """
    await make_whole(cell)
    async with LiveStreams(cell) as tasks:
        cell.signal("executor-0", signal.SIGKILL)
        await cell.wait_exit("executor-0")
        async with asyncio.timeout(TIMEOUT):
            outputs = await asyncio.gather(*tasks)
    await _assert_undisturbed(outputs, reference)
    cell.signal("executor-1", signal.SIGTERM)
    assert await cell.wait_exit("executor-1") == 0
    await wait_serving(cell.gateway_address, serving=False)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await generate(cell, request_for([5], 5))
    error = from_rpc_error(raised.value)
    assert error.code == grpc.StatusCode.UNAVAILABLE
    assert error.retry_delay
    cell.start("executor-0")
    await wait_serving(cell.gateway_address)
    assert (await generate(cell, request_for([5], 5, ignore_eos=True))).usage.completion_tokens == 5
    await wait_executors(cell, 1)


@pytest.mark.asyncio
async def test_an_operator_drains_every_service(cell: ProcessStack, reference: Reference) -> None:
    """AdminService.Drain does what SIGTERM does: an executor hands its sequences over and the scheduler its requests,
    without a token lost; the gateway ends what its grace does not suffice for. Each exits with 0. Whom nobody knows is
    not found.
    """
    await make_whole(cell)
    async with octavo.AsyncAdminClient(cell.admin_address) as admin:
        with pytest.raises(octavo.NotFoundError):
            await admin.drain(executor="127.0.0.1:1")
        async with LiveStreams(cell) as tasks:
            await admin.drain(executor=cell.address("executor-0"))
            await admin.drain(scheduler=True)
            assert await cell.wait_exit("executor-0") == 0
            assert await cell.wait_exit("scheduler") == 0
            cell.start("scheduler")
            async with asyncio.timeout(TIMEOUT):
                outputs = await asyncio.gather(*tasks)
        await _assert_undisturbed(outputs, reference)
        async with LiveStreams(cell) as tasks:
            await admin.drain(gateway="self")
            async with asyncio.timeout(TIMEOUT):
                results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        assert isinstance(result, grpc.aio.AioRpcError), result
        assert from_rpc_error(result).reason == "SHUTTING_DOWN"
    assert await cell.wait_exit("gateway") == 0
    await wait_executors(cell, 1)


@pytest.mark.asyncio
async def test_nothing_is_left_behind(shared_processes: ProcessStack) -> None:
    """There is a round of 64 streams and 64 cancelled ones after which no service has a thread or descriptor more."""
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

    def more(before: dict[str, tuple[int, int]]) -> dict[str, object]:
        now = held()
        return {name: (was, now[name]) for name, was in before.items() if any(map(int.__gt__, now[name], was))}

    await busy()
    # grpc's own pools of threads grow with need, to a bound: what leaks grows in every round.
    for _ in range(ROUNDS):
        before = held()
        await busy()
        # The sockets of closed connections go when those threads get to it.
        end = time.monotonic() + SETTLING_SECONDS
        while (left := more(before)) and time.monotonic() < end:
            await asyncio.sleep(0.05)
        if not left:
            break
    assert not left, "threads and descriptors before and after"


async def _assert_undisturbed(outputs: list[object], reference: Reference) -> None:
    generation = {"eos_token_id": None}
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = output.choices[0].token_ids  # type: ignore[attr-defined]
        assert tokens == reference.greedy(prompt, LONG, **generation)
