"""The scheduler's metrics page, over HTTP from a scheduler at work."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import threading
import urllib.error

import pytest
from metrics_page import Page, scrape
from wire_executor import FakeExecutor
from wire_scheduler import RunningScheduler, running_scheduler

from octavo.internal.executor.v1 import executor_pb2
from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.rpc.server import PortTakenError
from octavo.settings import SchedulerSettings
from scheduler_svc.server import SchedulerServer

PROMPT = list(range(1, 11))
STAGES = ("queue", "prepare", "forward", "sample")


async def page_from(scheduler: RunningScheduler) -> Page:
    """Scrape a scheduler."""
    return await scrape(scheduler.server.metrics_port)


def blocks(page: Page, executor: FakeExecutor) -> dict[str, float]:
    """Return the blocks of one executor by state."""
    states = ("free", "owned", "cached", "pinned")
    return {state: page[f'octavo_kv_blocks{{executor="{executor.address}",state="{state}"}}'] for state in states}


@pytest.mark.asyncio
async def test_gauges_are_zero_once_every_request_has_been_ended() -> None:
    """Waiting, running and preempted requests, ended by client, operator and loss: the next page shows none of them."""
    executor = FakeExecutor(num_blocks=24, max_num_seqs=4)
    async with running_scheduler(executor, gateway_grace=0) as scheduler:
        gateway = await scheduler.ready_gateway()
        lost = await scheduler.gateway()
        executor.hold()
        for counter in range(1, 7):
            await gateway.submit(counter, PROMPT, 60, seed=counter)
        for counter in range(1, 3):
            await lost.submit(counter, PROMPT, 60, seed=counter)
        while (load := await gateway.load()).num_preemptions == 0 or load.num_requests < 8:
            executor.permit(1)
        page = await page_from(scheduler)
        assert page["octavo_scheduler_requests_live"] == page["octavo_scheduler_requests_accepted_total"] == 8
        assert page['octavo_scheduler_sequences{state="waiting"}'] >= 4
        assert page['octavo_scheduler_sequences{state="running"}'] >= 1
        assert page["octavo_preemptions_total"] >= 1
        assert page["octavo_scheduler_gateways"] == 2
        held = blocks(page, executor)
        assert held["owned"] > 0
        assert sum(held.values()) == 23
        for counter in range(1, 4):
            await gateway.cancel(counter)
        for counter in range(4, 7):
            target = scheduler_pb2.CancelRequestRequest(gateway=gateway.incarnation, request=counter)
            await gateway.stub.CancelRequest(target)
        await lost.break_stream()
        await gateway.until_load(lambda load: load.num_requests == 0)
        page = await page_from(scheduler)
        assert page["octavo_scheduler_requests_live"] == 0
        assert page['octavo_scheduler_sequences{state="waiting"}'] == 0
        assert page['octavo_scheduler_sequences{state="running"}'] == 0
        left = blocks(page, executor)
        assert (left["owned"], left["free"] + left["cached"]) == (0, 23)
        assert page["octavo_scheduler_requests_accepted_total"] == 8
        assert page['octavo_scheduler_requests_ended_total{outcome="cancelled"}'] == 8
        assert page["octavo_scheduler_gateways"] == 1
        assert page["octavo_scheduler_generated_tokens_total"] > 0
        executor.release()


@pytest.mark.asyncio
async def test_pages_balance_while_requests_come_and_go() -> None:
    """Scrapes in the middle of real traffic: accepted = ended + live on each of them, and counters never fall."""
    draw = random.Random(3)
    async with running_scheduler(FakeExecutor()) as scheduler:
        gateway = await scheduler.ready_gateway()
        pages: list[Page] = []

        async def look() -> None:
            while len(gateway.outcomes) < 60:
                pages.append(await page_from(scheduler))

        looking = asyncio.ensure_future(look())
        for counter in range(1, 61):
            model = {"model": "unknown"} if counter % 10 == 0 else {}
            await gateway.submit(counter, PROMPT, draw.randrange(1, 12), **model)
            if counter % 3 == 0:
                await gateway.cancel(counter)
            await asyncio.sleep(0)
        await gateway.over(*range(1, 61))
        await looking
        pages.append(await page_from(scheduler))
        outcomes = ("finished", "failed", "cancelled")
        for page in pages:
            ended = sum(page[f'octavo_scheduler_requests_ended_total{{outcome="{each}"}}'] for each in outcomes)
            live = page["octavo_scheduler_requests_live"]
            assert page["octavo_scheduler_requests_accepted_total"] == ended + live
        for before, after in itertools.pairwise(pages):
            assert all(after[name] >= value for name, value in before.items() if name.split("{")[0].endswith("_total"))
        assert pages[-1]["octavo_scheduler_requests_accepted_total"] == 54
        assert pages[-1]['octavo_scheduler_requests_rejected_total{code="NOT_FOUND"}'] == 6
        tokens = sum(len(tokens) for outcome in gateway.outcomes.values() for tokens in outcome.tokens.values())
        assert pages[-1]["octavo_scheduler_generated_tokens_total"] >= tokens > 0


@pytest.mark.asyncio
async def test_no_client_can_make_a_series() -> None:
    """A thousand made-up models, labels and tenants, malformed ones among them, leave the set of series as it was."""
    async with running_scheduler(FakeExecutor(), check_invariants=False) as scheduler:
        gateway = await scheduler.ready_gateway()
        await gateway.submit(1, PROMPT, 2)
        await gateway.over(1)
        before = await page_from(scheduler)
        for counter in range(2, 1002):
            name = f"made-up-{counter}"
            model = {"model": name} if counter % 2 else {}
            await gateway.submit(counter, PROMPT, counter % 3, label=name, tenant=name, **model)
        await gateway.over(*range(2, 1002))
        after = await page_from(scheduler)
        assert set(after) == set(before)
        rejected = sum(value for name, value in after.items() if "rejected" in name)
        assert rejected + after["octavo_scheduler_requests_accepted_total"] == 1001


class TimedExecutor(FakeExecutor):
    """Tells of each step's time a tenth of a millisecond and more."""

    async def _answer(self, result: executor_pb2.StepResult, context: object) -> None:
        for nanoseconds, stage in enumerate(STAGES, start=1):
            getattr(result.timings, stage).FromNanoseconds(nanoseconds * 1000)
        await super()._answer(result, context)


@pytest.mark.asyncio
async def test_series_of_an_executor_live_as_long_as_its_session() -> None:
    """Its blocks are on the page while it is in session, and gone after; what its steps took stays counted."""
    executors = [TimedExecutor(), TimedExecutor()]
    async with running_scheduler(*executors) as scheduler:
        gateway = await scheduler.ready_gateway(2)
        for counter in range(1, 9):
            await gateway.submit(counter, PROMPT, 12, seed=counter)
        await gateway.over(*range(1, 9))
        await gateway.until_load(lambda load: all(each.num_in_flight == 0 for each in load.executors))
        page = await page_from(scheduler)
        assert page["octavo_scheduler_executors"] == 2
        for executor in executors:
            left = blocks(page, executor)
            assert (left["owned"], left["free"] + left["cached"]) == (0, 128)
            assert left["cached"] > 0
        steps = page["octavo_step_rows_count"]
        assert steps > 20
        assert page["octavo_step_tokens_sum"] == 8 * (10 + 11) - page["octavo_prefix_hit_tokens_total"]
        assert page["octavo_step_rows_sum"] >= 8 * 12
        assert page["octavo_schedule_seconds_count"] == page["octavo_step_hop_seconds_count"] == steps
        for place, stage in enumerate(STAGES, start=1):
            assert page[f'octavo_step_seconds_count{{stage="{stage}"}}'] == steps
            assert page[f'octavo_step_seconds_sum{{stage="{stage}"}}'] == pytest.approx(place * 1e-6 * steps)
        assert page["octavo_queue_seconds_count"] == 8
        await executors[0].stop()
        await gateway.until_load(lambda load: len(load.executors) == 1)
        page = await page_from(scheduler)
        assert page["octavo_scheduler_executors"] == 1
        assert not [name for name in page if executors[0].address in name]
        assert sum(blocks(page, executors[1]).values()) == 128
        assert page["octavo_step_rows_count"] == steps


# The page's life.


@pytest.mark.asyncio
async def test_the_page_is_there_before_the_first_call_and_until_the_last() -> None:
    """It is served from `start` on, before anything works, and nobody listens once the scheduler has stopped."""
    settings = SchedulerSettings(executors="127.0.0.1:1", port=0, metrics_port=0)
    server = SchedulerServer(settings)
    await server.start()
    assert (await scrape(server.metrics_port))["octavo_scheduler_executors"] == 0
    stop = asyncio.Event()
    stop.set()
    assert await server.run(stop.wait()) == 0
    with pytest.raises(urllib.error.URLError):
        await scrape(server.metrics_port)


@pytest.mark.asyncio
@pytest.mark.parametrize("taken_port", ["port", "metrics_port"])
async def test_where_one_port_is_taken_the_other_is_let_go(taken_port: str) -> None:
    """Whichever of the two cannot be had, the error names it, and nothing is left listening."""
    threads = set(threading.enumerate())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        ports = {"port": 0, "metrics_port": 0} | {taken_port: number}
        server = SchedulerServer(SchedulerSettings(executors="127.0.0.1:1", **ports))
        with pytest.raises(PortTakenError, match=f"127.0.0.1:{number}"):
            await server.start()
        if taken_port == "port":
            with pytest.raises(urllib.error.URLError):
                await scrape(server.metrics_port)
    assert not [each for each in set(threading.enumerate()) - threads if "serve_forever" in each.name]
