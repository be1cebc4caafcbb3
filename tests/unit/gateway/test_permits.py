"""Permits: how much is served at once, what is refused, and that every one comes back (C13)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from gateway_fakes import TIMEOUT, FakeScheduler, Stack, running_stack
from gateway_page import value_of
from hypothesis import given
from hypothesis import strategies as st

from gateway.metrics import GatewayMetrics
from gateway.permits import Permits
from octavo.models.prepared import PreparedModel
from octavo.rpc.channel import open_channel
from octavo.rpc.errors import ServiceError, from_rpc_error
from octavo.v1 import inference_pb2, inference_pb2_grpc

TEXT = "the cat sat"
KINDS = ("Generate", "GenerateOnce", "Score")


def request_of(n: int = 1, **fields: Any) -> inference_pb2.GenerateRequest:
    """Return a request for so many choices."""
    return inference_pb2.GenerateRequest(text=TEXT, n=n, **fields)


async def read(call: Any) -> Any:
    """Read a call of either shape to its end; return its error, None where it went well."""
    try:
        if isinstance(call, grpc.aio.UnaryStreamCall):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    return None


async def until_free(stack: Stack, count: int) -> None:
    """Return once so many permits are free. A call's task ends a moment after its client has the answer."""
    async with asyncio.timeout(TIMEOUT):
        while value_of(await stack.scrape(), "octavo_permits_free") != count:
            pass
    stack.gateway.permits.check_invariants()


def check_full(error: ServiceError | None, held: int, maximum: int) -> None:
    """The error says that all is taken, how much that is, and when to try again."""
    assert error is not None
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS")
    assert error.retry_delay is not None
    assert (error.metadata["held"], error.metadata["maximum"]) == (str(held), str(maximum))


@pytest.mark.asyncio
async def test_n_counts_n(prepared: PreparedModel) -> None:
    """Each choice takes a permit; what does not fit is refused at once, with when to try again, and never submitted."""
    scheduler = FakeScheduler(auto=False)
    async with running_stack(prepared, scheduler, max_requests=4) as stack:
        inference = stack.inference
        running = asyncio.create_task(read(inference.Generate(request_of(3), timeout=TIMEOUT)))
        await scheduler.wait_received("submit")
        once = inference_pb2.GenerateOnceRequest(request=request_of(best_of=2))
        part = inference_pb2.Continuation(text="b")
        scored = inference_pb2.ScoreRequest(text="a", continuations=[part] * 2)
        for call in (inference.Generate(request_of(2)), inference.GenerateOnce(once), inference.Score(scored)):
            check_full(await read(call), 3, 4)
        other = asyncio.create_task(read(inference.Generate(request_of(1), timeout=TIMEOUT)))
        await scheduler.wait_received("submit", 2)
        check_full(await read(inference.Generate(request_of(1))), 4, 4)
        assert value_of(await stack.scrape(), "octavo_permits_free") == 0
        scheduler.step(40)
        assert [await running, await other] == [None, None]
        await until_free(stack, 4)
        page = await stack.scrape()
        assert value_of(page, "octavo_requests_refused_total", code="resource_exhausted") == 4
        assert value_of(page, "octavo_permits_maximum") == 4
        assert len(scheduler.of_kind("submit")) == 2


@pytest.mark.asyncio
async def test_what_can_never_fit(prepared: PreparedModel) -> None:
    """More choices than the gateway serves at once are the request's fault, named by the field that makes them so many.

    A number that no request may have is refused for that.
    """
    async with running_stack(prepared, max_requests=4) as stack:
        part = inference_pb2.Continuation(text="b")
        once = stack.inference.GenerateOnce
        for call, field in (
            (stack.inference.Generate(request_of(5)), "n"),
            (stack.inference.Generate(request_of(2**32 - 1)), "n"),
            (once(inference_pb2.GenerateOnceRequest(request=request_of(best_of=5))), "best_of"),
            (stack.inference.Score(inference_pb2.ScoreRequest(text="a", continuations=[part] * 5)), "continuations"),
        ):
            error = await read(call)
            assert (error.code, [each.field for each in error.violations]) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                [field],
            )
        assert await read(stack.inference.Generate(request_of(4))) is None
        await until_free(stack, 4)
    async with running_stack(prepared, max_requests=200) as stack:
        for count in (0, 129, 2**32 - 1):
            error = await read(stack.inference.Generate(request_of(count)))
            assert "1 to 128" in error.message
        await until_free(stack, 200)


@pytest.mark.asyncio
async def test_slow_readers_keep_their_permits(prepared: PreparedModel) -> None:
    """A stream that the scheduler has finished holds its permits until its client has read it."""
    total = 800
    output = [3 + index % 250 for index in range(total)]
    scheduler = FakeScheduler(script=lambda submit, choice: output, auto=False)
    async with running_stack(prepared, scheduler, max_model_len=2000, max_requests=1) as stack:
        # A small window: what the client does not read stays with the gateway.
        options = [
            ("grpc.http2.lookahead_bytes", 1),
            ("grpc.http2.bdp_probe", 0),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        address = f"127.0.0.1:{stack.gateway.port}"
        async with grpc.aio.insecure_channel(address, options=options) as narrow:
            request = request_of(output=inference_pb2.OutputConfig(top_logprobs=20))
            slow = inference_pb2_grpc.InferenceServiceStub(narrow).Generate(request)
            await scheduler.wait_received("submit")
            scheduler.step(total)
            await scheduler.wait_until(lambda: scheduler.acknowledged == scheduler.sequence)
            assert scheduler.running == {}
            check_full(await read(stack.inference.Generate(request_of())), 1, 1)
            tokens = [token for event in [each async for each in slow] for token in event.delta.token_ids]
            assert tokens == output
        await until_free(stack, 1)


@pytest.mark.asyncio
async def test_permits_of_whole_answers_outlast_their_requests(prepared: PreparedModel) -> None:
    """GenerateOnce's answer leaves after its handler has returned, and its permits are held until then."""
    total = 900
    output = [3 + index % 250 for index in range(total)]
    scheduler = FakeScheduler(script=lambda submit, choice: output)
    async with running_stack(prepared, scheduler, max_model_len=2000, max_requests=64) as stack:
        permits = stack.gateway.permits
        seen: list[int] = []
        remove = stack.gateway.live.remove

        def watch(*args: Any) -> None:
            remove(*args)
            asyncio.get_running_loop().call_soon(lambda: seen.append(permits.num_free))

        stack.gateway.live.remove = watch  # type: ignore[method-assign]
        request = inference_pb2.GenerateOnceRequest(
            request=request_of(4, output=inference_pb2.OutputConfig(top_logprobs=5))
        )
        async with open_channel(f"127.0.0.1:{stack.gateway.port}") as channel:
            await inference_pb2_grpc.InferenceServiceStub(channel).GenerateOnce(request, timeout=TIMEOUT)
        assert seen == [60]
        await until_free(stack, 64)


@pytest.mark.asyncio
async def test_every_ending_gives_them_back(prepared: PreparedModel) -> None:
    """Good ends, refusals, errors of the cell, deadlines, cancels: behind each all permits are free again."""
    scheduler = FakeScheduler(auto=False, accepts=False)
    async with running_stack(prepared, scheduler, max_requests=8) as stack:
        inference = stack.inference
        assert (await read(inference.Generate(request_of(2, stopping={"min_tokens": 5000})))) is not None
        await until_free(stack, 8)
        assert (await read(inference.Generate(request_of(2), timeout=0.1))).code is grpc.StatusCode.DEADLINE_EXCEEDED
        await until_free(stack, 8)
        call = inference.Generate(request_of(2))
        await scheduler.wait_received("submit", 2)
        call.cancel()
        await until_free(stack, 8)
        scheduler.send_pools([])
        await stack.wait_health(False)
        assert (await read(inference.Generate(request_of(2)))).reason == "NO_EXECUTOR"
        await until_free(stack, 8)


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", [0, 1])
async def test_a_thousand_random_cancels(prepared: PreparedModel, seed: int) -> None:
    """C13: under random calls of all kinds, cancelled anywhere or not, permits cover what is live and all come back."""
    rng = random.Random(seed)
    maximum = 24
    refused = 0
    async with running_stack(prepared, max_requests=maximum) as stack:
        permits, live = stack.gateway.permits, stack.gateway.live
        remove, add = live.remove, live.add

        def check() -> None:
            permits.check_invariants()
            num_live = sum(len(request.choices) for request in live.unended())
            assert num_live <= maximum - permits.num_free

        def checked(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **fields: Any) -> Any:
                result = method(*args, **fields)
                check()
                return result

            return call

        live.add, live.remove = checked(add), checked(remove)  # type: ignore[method-assign]

        async def one() -> None:
            nonlocal refused
            n, kind, patience = rng.randint(1, 4), rng.choice(KINDS), rng.randint(0, 40)
            call = start(stack, kind, n)
            reading = asyncio.create_task(read(call))
            if rng.random() < 0.8:
                await turns(patience)
                call.cancel()
            try:
                error = await reading
            except asyncio.CancelledError:
                return
            if error is not None and error.code is not grpc.StatusCode.CANCELLED:
                assert error.reason == "TOO_MANY_REQUESTS"
                refused += 1

        async with asyncio.timeout(100):
            for _ in range(20):
                await asyncio.gather(*(one() for _ in range(25)))
        await until_free(stack, maximum)
        assert refused
        assert await read(stack.inference.Generate(request_of(maximum))) is None
        await until_free(stack, maximum)


def start(stack: Stack, kind: str, n: int) -> Any:
    """Begin a call that takes so many permits."""
    match kind:
        case "Generate":
            return stack.inference.Generate(request_of(n))
        case "GenerateOnce":
            return stack.inference.GenerateOnce(inference_pb2.GenerateOnceRequest(request=request_of(n)))
    parts = [inference_pb2.Continuation(text="b")] * n
    return stack.inference.Score(inference_pb2.ScoreRequest(text="a", continuations=parts))


async def turns(count: int) -> None:
    """Let the loop turn so many times."""
    for _ in range(count):
        await asyncio.sleep(0)


@given(st.integers(1, 20), st.lists(st.tuples(st.integers(0, 25), st.booleans()), max_size=40), st.randoms())
def test_permits_are_a_ledger(maximum: int, steps: list[tuple[int, bool]], rng: random.Random) -> None:
    """Whatever is taken and given back, free and held make the maximum, and only what does not fit is refused."""
    permits = Permits(maximum, GatewayMetrics(["tiny"]))
    held: list[tuple[int, Any]] = []
    for count, gives_back in steps:
        if gives_back and held:
            _, context = held.pop(rng.randrange(len(held)))
            context.__exit__(None, None, None)
        free = maximum - sum(each for each, _ in held)
        assert permits.num_free == free
        context = permits.held(count, "n")
        if count <= free:
            context.__enter__()
            held.append((count, context))
        else:
            with pytest.raises(ServiceError) as raised:
                context.__enter__()
            assert (raised.value.retry_delay is None) == (count > maximum)
        permits.check_invariants()
    for _, context in held:
        context.__exit__(None, None, None)
    assert permits.num_free == maximum
