"""The metrics pages of a whole cell at work: they add up, forget nobody and know no client by name."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter

import grpc
import grpc.aio
import pytest
from gateway_page import check_requests_balance, endings_of, refusals_of, value_of
from metrics_page import Page, scrape
from stack import TIMEOUT, Stack, in_process, wait_idle
from stack_client import request_for

from octavo.models.prepared import PreparedModel
from octavo.rpc.channel import open_channel
from octavo.rpc.errors import from_rpc_error
from octavo.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc

KINDS = ("finishes", "leaves", "late", "bad", "operator")


async def page_of(stack: Stack, service: str) -> Page:
    """Scrape a service."""
    return await scrape(int(stack.metrics_address(service).rpartition(":")[2]))


async def gateway_page(stack: Stack) -> Page:
    """Scrape the gateway; its requests balance."""
    page = await page_of(stack, "gateway")
    check_requests_balance(page)
    return page


async def scheduler_page(stack: Stack) -> Page:
    """Scrape the scheduler; its requests balance."""
    page = await page_of(stack, "scheduler")
    ended = value_of(page, "octavo_scheduler_requests_ended_total")
    live = value_of(page, "octavo_scheduler_requests_live")
    assert value_of(page, "octavo_scheduler_requests_accepted_total") == ended + live
    return page


def gained(name: str, before: Page, after: Page, **labels: str) -> float:
    """Return by how much a counter has grown."""
    return value_of(after, name, **labels) - value_of(before, name, **labels)


@pytest.mark.asyncio
async def test_every_scrape_adds_up(stack: Stack) -> None:
    """F9: clients finish, leave, run out of time, ask for nonsense or are cancelled: each is counted as what it was.

    On every page of gateway and scheduler meanwhile accepted = finished + failed + cancelled + live. At the end the
    tokens of those that were cut short are among the tokens counted, and the two services agree.
    """
    draw = random.Random(7)
    seen: Counter[str] = Counter()
    tokens_read = 0
    before, scheduler_before = await gateway_page(stack), await scheduler_page(stack)

    async def client(channel: grpc.aio.Channel, admin: grpc.aio.Channel, kind: str) -> None:
        nonlocal tokens_read
        length = draw.randint(5, 30) if kind == "finishes" else 1500
        request = request_for([9] * draw.randint(1, 40), length, n=0 if kind == "bad" else 2, ignore_eos=True)
        timeout = 0.4 if kind == "late" else TIMEOUT
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=timeout)
        deltas = 0
        try:
            while (event := await call.read()) is not grpc.aio.EOF:
                tokens_read += len(event.delta.token_ids)
                deltas += event.HasField("delta")
                if deltas == 4 and kind == "leaves":
                    call.cancel()
                if event.HasField("started") and kind == "operator":
                    cancel = admin_pb2.CancelRequestRequest(request_id=event.started.request_id)
                    await admin_pb2_grpc.AdminServiceStub(admin).CancelRequest(cancel)
            seen["finished"] += 1
        except asyncio.CancelledError:
            seen["left"] += 1
        except grpc.aio.AioRpcError as error:
            seen[from_rpc_error(error).reason] += 1

    async with open_channel(stack.gateway_address) as channel, open_channel(stack.admin_address) as admin:
        kinds = [*KINDS] * 5
        draw.shuffle(kinds)
        clients = [asyncio.create_task(client(channel, admin, kind)) for kind in kinds]
        most_live = 0.0
        async with asyncio.timeout(TIMEOUT):
            while not all(each.done() for each in clients):
                most_live = max(most_live, value_of(await gateway_page(stack), "octavo_requests_live"))
                await scheduler_page(stack)
            await asyncio.gather(*clients)
        await wait_idle(stack)
    after = await gateway_page(stack)
    endings = endings_of(after) - endings_of(before)
    refused = Counter(refusals_of(after)) - Counter(refusals_of(before))
    assert most_live > 0
    assert seen["finished"] == endings["finished", "length"] == 5
    assert seen["CANCELLED_BY_OPERATOR"] == endings["cancelled", "operator"] == 5
    assert seen["left"] == endings["cancelled", "client"] == 5
    # A client's time may have passed before its request came through.
    # Whose timer is the first is chance: the gateway names the limit, and a client its code.
    assert seen["DEADLINE_EXCEEDED"] + seen["DEADLINE"] == 5
    assert endings["cancelled", "deadline"] + refused.pop("deadline_exceeded", 0) + refused.pop("cancelled", 0) <= 5
    assert refused == {"invalid_argument": 5}
    assert {outcome for outcome, _ in endings} <= {"finished", "cancelled"}
    completion = gained("octavo_completion_tokens_total", before, after)
    assert tokens_read <= completion
    scheduler_after = await scheduler_page(stack)
    assert completion <= gained("octavo_scheduler_generated_tokens_total", scheduler_before, scheduler_after)
    accepted = gained("octavo_requests_accepted_total", before, after)
    assert accepted == gained("octavo_scheduler_requests_accepted_total", scheduler_before, scheduler_after)
    assert accepted == gained("octavo_request_seconds_count", before, after)
    name = "octavo_scheduler_requests_ended_total"
    assert gained(name, scheduler_before, scheduler_after, outcome="finished") == 5


@pytest.mark.asyncio
async def test_gauges_forget_requests_that_were_aborted(tiny_model: PreparedModel) -> None:
    """F8: when all clients have gone, every gauge of live requests, sequences and blocks is 0 again."""
    async with in_process(tiny_model) as stack, open_channel(stack.gateway_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        calls = [stub.Generate(request_for([5] * 20, 100_000, n=4, ignore_eos=True)) for _ in range(8)]
        for call in calls:
            while not (await call.read()).HasField("delta"):
                pass
        assert value_of(await gateway_page(stack), "octavo_requests_live") == 8
        page = await scheduler_page(stack)
        assert value_of(page, "octavo_scheduler_sequences") == 32
        assert value_of(page, "octavo_kv_blocks", state="owned") >= 32
        for call in calls:
            call.cancel()
        await wait_idle(stack)
        async with asyncio.timeout(TIMEOUT):
            await stack.gateway.live.wait_empty()
        page = await gateway_page(stack)
        assert value_of(page, "octavo_requests_live") == 0
        assert endings_of(page) == {("cancelled", "client"): 8}
        page = await scheduler_page(stack)
        assert value_of(page, "octavo_scheduler_requests_live") == value_of(page, "octavo_scheduler_sequences") == 0
        assert value_of(page, "octavo_kv_blocks", state="owned") == 0


@pytest.mark.asyncio
async def test_clients_make_no_series(stack: Stack) -> None:
    """F10: model names and request labels of clients' own leave the series of every service as they were."""
    draw = random.Random(2)
    services = ("gateway", "scheduler", "executor-0")
    async with open_channel(stack.gateway_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def call(number: int) -> None:
            request = request_for([draw.randrange(3, 270)], 2)
            request.request_id = f"label-{draw.random()}"
            request.model = f"model-{draw.random()}" if number % 2 else ""
            expected = pytest.raises(grpc.aio.AioRpcError) if number % 2 else contextlib.nullcontext()
            with expected:
                async for _ in stub.Generate(request, timeout=TIMEOUT):
                    pass

        await call(0)
        before = {service: (await page_of(stack, service)).keys() for service in services}
        await asyncio.gather(*(call(number) for number in range(60)))
        await wait_idle(stack)
        assert {service: (await page_of(stack, service)).keys() for service in services} == before
