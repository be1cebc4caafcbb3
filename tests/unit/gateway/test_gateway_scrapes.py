"""The gateway's metrics page, scraped while clients, operators and the scheduler are at work."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from gateway_fakes import MAX_MODEL_LEN, TIMEOUT, FakeScheduler, Stack, running_stack
from gateway_page import endings_of, refusals_of, value_of

from gateway.live_request import format_request_id
from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.models.prepared import PreparedModel
from octavo.rpc.errors import from_rpc_error
from octavo.v1 import admin_pb2, inference_pb2

PROMPT = "the cat"


def long_script(submit: scheduler_pb2.Submit, choice: int) -> list[int]:
    """Write the same token for ever."""
    return [5] * submit.stopping.max_tokens


async def start(stack: Stack, **fields: Any) -> Any:
    """Start a stream, let it have two tokens, and return its call."""
    call = stack.inference.Generate(inference_pb2.GenerateRequest(text=PROMPT, **fields))
    await stack.scheduler.wait_received("submit")
    stack.scheduler.step(2)
    while not (await call.read()).HasField("delta"):
        pass
    return call


async def end_by_itself(stack: Stack, call: Any) -> None:
    """Let the output end."""
    stack.scheduler.step(MAX_MODEL_LEN)
    await drain(call)


async def end_by_cancel(stack: Stack, call: Any) -> None:
    """Let the client go away."""
    call.cancel()


async def end_by_operator(stack: Stack, call: Any) -> None:
    """Let an operator cancel the request."""
    (submit,) = stack.scheduler.of_kind("submit")
    name = format_request_id(stack.gateway.live.incarnation, submit.request)
    await stack.admin.CancelRequest(admin_pb2.CancelRequestRequest(request_id=name))
    await drain(call)


async def end_by_shutdown(stack: Stack, call: Any) -> None:
    """Close the gateway to requests, as its stop does."""
    stack.gateway.live.close()
    await drain(call)


def end_by_error(code: grpc.StatusCode) -> Callable[[Stack, Any], Any]:
    """Return what lets the scheduler fail the request."""

    async def end(stack: Stack, call: Any) -> None:
        (submit,) = stack.scheduler.of_kind("submit")
        stack.scheduler.running.clear()
        error = scheduler_pb2.RequestError(code=code.value[0], reason="ANY", message="any")
        stack.scheduler.sequence += 1
        finished = scheduler_pb2.Finished(sequence=stack.scheduler.sequence, request=submit.request, error=error)
        stack.scheduler.send(finished=finished)
        await drain(call)

    return end


async def drain(call: Any) -> None:
    """Read a stream to its end, whatever that is."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError:
        pass


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("fields", "end", "outcome", "reason"),
    [
        ({"stopping": {"max_tokens": 9}}, end_by_itself, "finished", "length"),
        ({}, end_by_cancel, "cancelled", "client"),
        ({}, end_by_operator, "cancelled", "operator"),
        ({}, end_by_shutdown, "cancelled", "shutdown"),
        ({}, end_by_error(grpc.StatusCode.DEADLINE_EXCEEDED), "cancelled", "deadline"),
        ({}, end_by_error(grpc.StatusCode.RESOURCE_EXHAUSTED), "failed", "resource_exhausted"),
        ({}, end_by_error(grpc.StatusCode.CANCELLED), "failed", "cancelled"),
        ({}, end_by_error(grpc.StatusCode.OK), "failed", "unknown"),
    ],
)
async def test_every_end_is_counted_once(
    prepared: PreparedModel, fields: dict[str, Any], end: Callable[[Stack, Any], Any], outcome: str, reason: str
) -> None:
    """A request that had tokens is counted once however it ends, with all of its tokens (F9)."""
    async with running_stack(prepared, FakeScheduler(script=long_script, auto=False)) as stack:
        call = await start(stack, n=2, **fields)
        page = await stack.scrape()
        assert (value_of(page, "octavo_requests_live"), endings_of(page)) == (1, {})
        await end(stack, call)
        await stack.wait_empty()
        page = await stack.scrape()
        assert endings_of(page) == {(outcome, reason): 1}
        assert (value_of(page, "octavo_requests_accepted_total"), value_of(page, "octavo_requests_live")) == (1, 0)
        tokens = 18 if outcome == "finished" else 4
        assert value_of(page, "octavo_completion_tokens_total") == tokens
        assert value_of(page, "octavo_inter_token_seconds_count") == tokens - 2
        assert value_of(page, "octavo_time_to_first_token_seconds_count") == 1
        assert value_of(page, "octavo_prompt_tokens_total") == len(
            stack.scheduler.of_kind("submit")[0].prompt_token_ids
        )
        assert refusals_of(page) == {}


@pytest.mark.asyncio
async def test_length_of_any_choice(prepared: PreparedModel) -> None:
    """A request with several choices ended by length if any of them did, else by a stop token."""
    async with running_stack(prepared) as stack:  # writes the prompt again and stops
        await stack.generate(inference_pb2.GenerateRequest(text="the cat sat", n=2))
        assert endings_of(await stack.scrape()) == {("finished", "stop"): 1}
        # Choice 1 writes a token less than choice 0, and so comes to its stop token.
        length = len(stack.scheduler.of_kind("submit")[0].prompt_token_ids)
        await stack.generate(inference_pb2.GenerateRequest(text="the cat sat", n=2, stopping={"max_tokens": length}))
        assert endings_of(await stack.scrape()) == {("finished", "stop"): 1, ("finished", "length"): 1}


@pytest.mark.asyncio
async def test_all_abort(prepared: PreparedModel) -> None:
    """When every client has gone no gauge remembers any of them (F8)."""
    async with running_stack(prepared, FakeScheduler(script=long_script, auto=False)) as stack:
        calls = [stack.inference.Generate(inference_pb2.GenerateRequest(text=PROMPT)) for _ in range(20)]
        await stack.scheduler.wait_received("submit", 20)
        stack.scheduler.step(3)
        page = await stack.scrape()
        assert (value_of(page, "octavo_requests_live"), value_of(page, "octavo_scheduler_connected")) == (20, 1)
        for call in calls:
            call.cancel()
        await stack.wait_empty()
        page = await stack.scrape()
        assert value_of(page, "octavo_requests_live") == 0
        assert endings_of(page) == {("cancelled", "client"): 20}
        await stack.scheduler.stop()
        await stack.wait_health(False)
        assert value_of(await stack.scrape(), "octavo_scheduler_connected") == 0


@pytest.mark.asyncio
async def test_deadline(prepared: PreparedModel) -> None:
    """A request whose time is up is cancelled for its deadline, whoever noticed first."""
    async with running_stack(prepared, FakeScheduler(script=long_script, auto=False)) as stack:
        await drain(stack.inference.Generate(inference_pb2.GenerateRequest(text=PROMPT), timeout=0.3))
        await stack.wait_empty()
        assert endings_of(await stack.scrape()) == {("cancelled", "deadline"): 1}


@pytest.mark.asyncio
async def test_refusals(prepared: PreparedModel) -> None:
    """What is refused before acceptance is counted by its code alone; what the scheduler rejects has failed."""
    async with running_stack(prepared, FakeScheduler(auto=False)) as stack:
        for fields in ({"text": ""}, {"text": "a", "n": 0}, {"text": "a", "model": "other"}):
            await drain(stack.inference.Generate(inference_pb2.GenerateRequest(**fields)))
        page = await stack.scrape()
        assert refusals_of(page) == {"invalid_argument": 2, "not_found": 1}
        assert value_of(page, "octavo_requests_accepted_total") == 0
        stack.scheduler.accepts = False
        call = stack.inference.Generate(inference_pb2.GenerateRequest(text="a"))
        (submit,) = await stack.scheduler.wait_received("submit")
        error = scheduler_pb2.RequestError(code=8, reason="QUEUE_FULL", message="full")
        stack.scheduler.send(rejected=scheduler_pb2.Rejected(request=submit.request, error=error))
        await drain(call)
        page = await stack.scrape()
        assert endings_of(page) == {("failed", "resource_exhausted"): 1}
        assert sum(refusals_of(page).values()) == 3
        await stack.scheduler.stop()
        await stack.wait_health(False)
        await drain(stack.inference.Generate(inference_pb2.GenerateRequest(text="a")))
        assert refusals_of(await stack.scrape())["unavailable"] == 1


@pytest.mark.asyncio
async def test_clients_make_no_series(prepared: PreparedModel) -> None:
    """A thousand model names, labels, request ids and metadata values leave the set of series as it was (F10)."""
    async with running_stack(prepared) as stack:
        series = (await stack.scrape()).keys()

        async def call(number: int) -> None:
            name = secrets.token_hex(8)
            model = "" if number % 10 == 0 else name
            request = inference_pb2.GenerateRequest(model=model, text="a", request_id=name)
            await drain(stack.inference.Generate(request, metadata=(("x-name", name),)))
            cancel = admin_pb2.CancelRequestRequest(request_id=f"{secrets.token_hex(16)}-{number + 10_000}")
            with pytest.raises(grpc.aio.AioRpcError):
                await stack.admin.CancelRequest(cancel)

        async with asyncio.timeout(60):
            for first in range(0, 1000, 50):
                await asyncio.gather(*(call(first + each) for each in range(50)))
        page = await stack.scrape()
        assert page.keys() == series
        assert refusals_of(page) == {"not_found": 900}
        assert endings_of(page) == {("finished", "stop"): 100}


@pytest.mark.asyncio
async def test_resubmitted_request_is_one_request(prepared: PreparedModel) -> None:
    """A request that a new scheduler takes over was accepted once, and its tokens are counted once."""
    async with running_stack(prepared, FakeScheduler(auto=False)) as stack:
        call = await start(stack)
        await stack.scheduler.stop()
        stack.scheduler.forget()
        await stack.scheduler.start()
        await stack.scheduler.wait_received("submit", 2)
        assert value_of(await stack.scrape(), "octavo_requests_accepted_total") == 1
        stack.scheduler.step(20)
        await drain(call)
        page = await stack.scrape()
        assert endings_of(page) == {("finished", "stop"): 1}
        prompt = stack.scheduler.of_kind("submit")[0].prompt_token_ids
        assert value_of(page, "octavo_completion_tokens_total") == len(prompt) + 1


@pytest.mark.asyncio
async def test_every_scrape_of_random_traffic_adds_up(prepared: PreparedModel) -> None:
    """Clients finish, leave, run out of time, ask for nonsense or are cancelled by an operator: every page balances.

    At the end each client is counted as what it saw.
    """
    draw = random.Random(5)
    seen: Counter[str] = Counter()

    async def client(stack: Stack, kind: str) -> None:
        # Those that are to be cut short would write for long.
        repeats = {"bad": 0, "finishes": draw.randint(1, 4)}.get(kind, 30)
        request = inference_pb2.GenerateRequest(text="the cat sat on the mat " * repeats, n=draw.randint(1, 3))
        call = stack.inference.Generate(request, timeout=0.01 if kind == "late" else TIMEOUT)
        try:
            count = 0
            while (event := await call.read()) is not grpc.aio.EOF:
                count += 1
                if kind == "leaves" and count == 5:
                    call.cancel()
                if kind == "operator" and count == 1:
                    name = event.started.request_id
                    await stack.admin.CancelRequest(admin_pb2.CancelRequestRequest(request_id=name))
            seen["finished"] += 1
        except asyncio.CancelledError:
            seen["left"] += 1
        except grpc.aio.AioRpcError as error:
            seen[from_rpc_error(error).reason] += 1

    async with running_stack(prepared) as stack:
        kinds = ["finishes", "leaves", "late", "bad", "operator"] * 10
        draw.shuffle(kinds)
        clients = [asyncio.create_task(client(stack, kind)) for kind in kinds]
        pages = [await stack.scrape()]
        async with asyncio.timeout(TIMEOUT):
            while not all(each.done() for each in clients):
                pages.append(await stack.scrape())
            await asyncio.gather(*clients)
        await stack.wait_empty()
        page = await stack.scrape()
        assert max(value_of(each, "octavo_requests_live") for each in pages) > 0
        endings, refusals = endings_of(page), refusals_of(page)
        # An operator can come too late for every one of them.
        assert endings["cancelled", "operator"] == seen["CANCELLED_BY_OPERATOR"]
        assert refusals["invalid_argument"] == seen["INVALID_REQUEST"] == 10
        # One whose time was up may have been refused for that, or never have come through.
        assert endings["finished", "stop"] >= seen["finished"] >= 10
        assert endings["cancelled", "client"] + endings["cancelled", "deadline"] > 0
        assert refusals.keys() <= {"invalid_argument", "cancelled", "deadline_exceeded"}
        assert {outcome for outcome, _ in endings} <= {"finished", "cancelled"}
        assert len(kinds) - 10 <= sum(endings.values()) + sum(refusals.values()) <= len(kinds)
