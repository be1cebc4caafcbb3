"""octavo.Client and octavo.AsyncClient with a whole cell: what they read, and what leaving them frees."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from reference import Reference
from stack import TIMEOUT, Stack, get_load, processes, wait_idle, wait_serving

import octavo
from octavo.models.prepared import PreparedModel

LONG = 1500
"""Tokens that a stream which is left was asked for: as many steps, had it gone on to its end."""
PROMPT = [5, 6, 7]


@contextlib.asynccontextmanager
async def cut_short(stack: Stack) -> AsyncIterator[None]:
    """Check that what runs within is cancelled: every block is free after far fewer steps than it asked for."""
    before = await wait_idle(stack)
    yield
    after = await wait_idle(stack)
    steps = [sum(each.num_steps for each in load.executors) for load in (before, after)]
    assert steps[1] - steps[0] < LONG


async def in_thread(call: Callable[[], object]) -> None:
    """Run blocking code beside the cell's own event loop."""
    async with asyncio.timeout(TIMEOUT):
        await asyncio.to_thread(call)


@pytest.mark.asyncio
async def test_both_clients_read_what_the_model_writes(stack: Stack, reference: Reference) -> None:
    """Greedy tokens are those of transformers; stream and completion of both clients agree on tokens, text and ends."""
    wanted = reference.greedy(PROMPT, 20)
    options: octavo.GenerateOptions = {"max_tokens": 20, "temperature": 0, "top_logprobs": 2}

    def read(client: octavo.Client) -> tuple[list[int], str, tuple[octavo.ChoiceFinished, ...], octavo.Usage]:
        stream = client.generate(PROMPT, **options)
        deltas = list(stream)
        assert [delta.first_token_index for delta in deltas] == [
            sum(len(earlier.token_ids) for earlier in deltas[:index]) for index in range(len(deltas))
        ]
        assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
        assert stream.started.model == stack.model.name
        token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
        return token_ids, "".join(delta.text for delta in deltas), stream.choices, stream.usage

    def blocking() -> None:
        with octavo.Client(stack.gateway_address) as client:
            token_ids, text, choices, usage = read(client)
            completion = client.complete(PROMPT, **options)
        assert token_ids == wanted == list(completion.choices[0].token_ids)
        assert text == completion.text
        assert (choices, usage) == ((completion.choices[0].finished,), completion.usage)

    await in_thread(blocking)
    async with octavo.AsyncClient(stack.gateway_address) as client:
        stream = client.generate(PROMPT, **options)
        assert [token_id async for delta in stream for token_id in delta.token_ids] == wanted
        assert (await client.complete(PROMPT, **options)).choices[0].finished == stream.choices[0]


@pytest.mark.asyncio
async def test_a_chat_its_tokens_and_the_model(stack: Stack) -> None:
    """A conversation gives what its own tokens give; n choices with a seed repeat; the model describes itself."""
    messages = [octavo.Message("user", "and then?")]
    async with octavo.AsyncClient(stack.gateway_address) as client:
        token_ids = await client.tokenize(messages)
        by_chat = await client.complete(messages, n=2, seed=7, max_tokens=8)
        by_tokens = await client.complete(token_ids, n=2, seed=by_chat.started.seed, max_tokens=8)
        assert by_chat.choices == by_tokens.choices
        assert len({choice.token_ids for choice in by_chat.choices}) == 2
        rendered = await client.detokenize(token_ids, skip_special_tokens=False)
        assert rendered == "<|im_start|>user\nand then?<|im_end|>\n<|im_start|>assistant\n"
        (model,) = await client.list_models()
        assert model == await client.get_model(stack.model.name)
        assert (model.revision, model.ready_executors) == (stack.model.revision, 1)


@pytest.mark.asyncio
async def test_errors_are_typed(stack: Stack) -> None:
    """Every bad field is named; no such model is NotFoundError; a timeout is a deadline that the cell keeps too."""
    async with octavo.AsyncClient(stack.gateway_address) as client:
        with pytest.raises(octavo.InvalidArgumentError) as raised:
            await client.complete("x", top_p=2, n=0)
        assert {violation.field for violation in raised.value.violations} == {"sampling.top_p", "n"}
        with pytest.raises(octavo.NotFoundError, match="nothing"):
            await client.get_model("nothing")
        async with cut_short(stack):
            with pytest.raises(octavo.DeadlineExceededError, match=r"0\.2 s"):
                await client.complete(PROMPT, max_tokens=LONG, ignore_eos=True, timeout=0.2)


class LeftError(Exception):
    """What a test leaves a loop with."""


def by_break(stream: octavo.GenerateStream) -> None:
    """The common way."""
    for _ in stream:
        break


def by_exception(stream: octavo.GenerateStream) -> None:
    """The loop's body fails."""

    def loop() -> None:
        for _ in stream:
            raise LeftError

    with pytest.raises(LeftError):
        loop()


def by_context(stream: octavo.GenerateStream) -> None:
    """The with-block ends while an iterator lives on."""
    deltas = iter(stream)
    with stream:
        next(deltas)


def by_closing_a_generator(stream: octavo.GenerateStream) -> None:
    """GeneratorExit, within a generator that reads."""
    generator = (delta.text for delta in stream)
    next(generator)
    generator.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("leave", [by_break, by_exception, by_context, by_closing_a_generator])
async def test_leaving_a_blocking_stream_frees_its_blocks(
    stack: Stack, leave: Callable[[octavo.GenerateStream], None]
) -> None:
    """With client and stream still there, nothing is live and no block is held, long before the output is complete."""
    with octavo.Client(stack.gateway_address) as client:
        stream = client.generate(PROMPT, max_tokens=LONG, ignore_eos=True)
        async with cut_short(stack):
            await in_thread(lambda: leave(stream))
        assert stream.choices == ()


async def by_async_break(stream: octavo.AsyncGenerateStream) -> None:
    """The common way."""
    async for _ in stream:
        break


async def by_timeout(stream: octavo.AsyncGenerateStream) -> None:
    """asyncio's timeout, with an iterator that lives on."""
    deltas = aiter(stream)

    async def read() -> None:
        async for _ in deltas:
            pass

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(read(), 0.2)


async def by_cancelling_the_task(stream: octavo.AsyncGenerateStream) -> None:
    """The task that reads is cancelled."""
    has_token = asyncio.Event()

    async def read() -> None:
        async for _ in stream:
            has_token.set()

    task = asyncio.create_task(read())
    await has_token.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_cancelling_at_once(stream: octavo.AsyncGenerateStream) -> None:
    """The task is cancelled before anything has come."""

    async def read() -> None:
        async for _ in stream:
            pass

    task = asyncio.create_task(read())
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.asyncio
@pytest.mark.parametrize("leave", [by_async_break, by_timeout, by_cancelling_the_task, by_cancelling_at_once])
async def test_leaving_an_async_stream_frees_its_blocks(
    stack: Stack, leave: Callable[[octavo.AsyncGenerateStream], Awaitable[None]]
) -> None:
    """With client and stream still there, nothing is live and no block is held, long before the output is complete."""
    async with octavo.AsyncClient(stack.gateway_address) as client:
        stream = client.generate(PROMPT, max_tokens=LONG, ignore_eos=True)
        async with cut_short(stack):
            await leave(stream)
        assert stream.choices == ()


@pytest.mark.asyncio
async def test_leaving_a_completion_frees_its_blocks(stack: Stack) -> None:
    """A task that waits for a whole output and is cancelled ends the request; so does the end of a client."""
    async with octavo.AsyncClient(stack.gateway_address) as client, cut_short(stack):
        task = asyncio.create_task(client.complete(PROMPT, max_tokens=LONG, ignore_eos=True))
        await is_live(stack)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    async with cut_short(stack):
        with octavo.Client(stack.gateway_address) as blocking:
            waiting = asyncio.create_task(
                asyncio.to_thread(blocking.complete, PROMPT, max_tokens=LONG, ignore_eos=True)
            )
            await is_live(stack)
        with pytest.raises(octavo.RequestCancelledError):
            await waiting


@pytest.mark.asyncio
async def test_an_operator_sees_and_ends_a_request(stack: Stack) -> None:
    """AdminClient finds it by its label and ends it; its reader is told who did; the load follows."""
    async with (
        octavo.AsyncClient(stack.gateway_address) as client,
        octavo.AsyncAdminClient(stack.admin_address) as admin,
        cut_short(stack),
    ):
        deltas = aiter(client.generate(PROMPT, max_tokens=LONG, ignore_eos=True, request_id="mine"))
        await anext(deltas)
        (info,) = await admin.list_requests()
        assert (info.label, info.model, info.prompt_tokens, info.live_choices) == ("mine", stack.model.name, 3, 1)
        assert (await admin.get_load()).live_requests == 1
        await admin.cancel_request(info.request_id)
        with pytest.raises(octavo.RequestCancelledError) as raised:
            await read_on(deltas)
        assert raised.value.reason == "CANCELLED_BY_OPERATOR"
        with pytest.raises(octavo.NotFoundError):
            await admin.cancel_request(info.request_id)

    def blocking() -> None:
        with octavo.AdminClient(stack.admin_address) as operator:
            assert operator.list_requests() == []
            assert [each.model for each in operator.get_load().executors] == [stack.model.name]

    await in_thread(blocking)


@pytest.mark.asyncio
async def test_the_gateways_end_reaches_the_reader(tiny_model: PreparedModel, tmp_path: Path) -> None:
    """Of a stream that is not to be taken up: SIGTERM is the gateway's own reason, SIGKILL a connection that was lost.

    The same client goes on with the next gateway at that address, and says so while there is none.
    """
    async with processes(tiny_model, tmp_path) as cell, octavo.AsyncClient(cell.gateway_address) as client:

        async def end_gateway(signum: signal.Signals) -> octavo.ServiceError:
            deltas = aiter(client.generate(PROMPT, max_tokens=LONG, ignore_eos=True, resume_grace=0))
            await anext(deltas)
            cell.signal("gateway", signum)
            with pytest.raises(octavo.UnavailableError) as raised:
                await read_on(deltas)
            await cell.wait_exit("gateway")
            return raised.value

        assert (await end_gateway(signal.SIGTERM)).reason == "SHUTTING_DOWN"
        with pytest.raises(octavo.UnavailableError, match=r"cannot connect to the gateway at .* refused; `octavo up"):
            await client.list_models()
        cell.start("gateway")
        await wait_serving(cell.gateway_address)
        assert "was lost" in str(await end_gateway(signal.SIGKILL))


async def read_on(deltas: AsyncIterator[octavo.Delta]) -> None:
    """Read to the end."""
    async with asyncio.timeout(TIMEOUT):
        async for _ in deltas:
            pass


async def is_live(stack: Stack) -> None:
    """Wait until a request runs."""
    async with asyncio.timeout(TIMEOUT):
        while not (await get_load(stack)).num_running:
            await asyncio.sleep(0.01)
