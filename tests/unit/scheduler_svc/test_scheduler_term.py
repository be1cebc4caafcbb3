"""The term: how it is chosen, and what a scheduler does that finds a newer one."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from wire_executor import FakeExecutor, expected_tokens
from wire_scheduler import running_scheduler

from scheduler_svc.server import EXIT_STALE
from scheduler_svc.term import StaleTermError, Term

PROMPT = list(range(1, 11))
FUTURE = 2**62


@pytest.mark.asyncio
async def test_the_term_is_the_start_time_where_peers_know_less() -> None:
    """Without a higher term told, the term is the start time; it never changes after."""
    term = Term(1000, patience=60)
    term.expect(["a"])
    term.heard("a", 999)
    assert await term.fixed() == 1000
    term.heard("b", 1000)
    assert await term.fixed() == 1000


@pytest.mark.asyncio
async def test_the_term_is_above_every_term_told_before_it_is_fixed() -> None:
    """It waits for every expected peer, and counts what others tell meanwhile."""
    term = Term(1000, patience=60)
    fixed = asyncio.ensure_future(term.fixed())
    term.expect(["a", "b"])
    term.heard("a", 1500)
    term.heard("gateway", 2000)
    await asyncio.sleep(0)
    assert not fixed.done()
    term.heard("b")
    assert await fixed == 2001


@pytest.mark.asyncio
async def test_the_wait_for_peers_is_bounded() -> None:
    """Peers that never answer, or are never found, hold the term up for the patience and no longer."""
    term = Term(1000, patience=0.01)
    assert await term.fixed() == 1000
    term = Term(1000, patience=0.01)
    term.expect(["silent"])
    assert await term.fixed() == 1000


@pytest.mark.asyncio
async def test_a_higher_term_makes_a_fixed_one_stale() -> None:
    """Whoever hears it is told at once, and so is who waits for it."""
    term = Term(1000, patience=0)
    await term.fixed()
    stale = asyncio.ensure_future(term.wait_until_stale())
    term.heard("a", 1000)
    with pytest.raises(StaleTermError, match="1001"):
        term.heard("a", 1001)
    assert (await stale).told == 1001


@pytest.mark.asyncio
async def test_sessions_begin_above_every_executors_highest_term() -> None:
    """One executor knows a term from a clock that ran ahead: all sessions and gateways get the next higher."""
    executors = [FakeExecutor(), FakeExecutor(highest_term=FUTURE)]
    async with running_scheduler(*executors) as scheduler:
        gateway = await scheduler.ready_gateway(2)
        assert [executor.welcome.highest_term for executor in executors] == [FUTURE + 1, FUTURE + 1]
        assert (await gateway.load()).term == FUTURE + 1
    async with running_scheduler(*executors) as scheduler:
        await scheduler.ready_gateway(2)
        assert executors[0].welcome.highest_term == FUTURE + 2


@pytest.mark.asyncio
async def test_a_term_is_about_the_start_time() -> None:
    """Without other hints the term is the wall clock in ns."""
    before = time.time_ns()
    async with running_scheduler() as scheduler:
        gateway = await scheduler.gateway(attach=False)
        welcome = await gateway.attach(highest_term=7)
        assert before < welcome.term < time.time_ns()


@pytest.mark.asyncio
async def test_a_refused_begin_ends_the_scheduler() -> None:
    """An executor that learns of a higher term after its Welcome refuses Begin;
    the scheduler ends its streams and exits.
    """
    executor = FakeExecutor()
    async with running_scheduler(executor) as scheduler:
        gateway = await scheduler.ready_gateway()
        await gateway.submit(1, PROMPT, 240)
        await gateway.until(lambda: bool(gateway.outcomes[1].tokens))

        def newer_scheduler() -> None:
            executor.welcome.highest_term = FUTURE

        executor.before_begin = newer_scheduler
        gateway.acknowledges = False
        executor.break_streams()
        status = await gateway.ended()
        assert status is not None
        assert status.code() is grpc.StatusCode.UNAVAILABLE
        assert await scheduler.exit_code() == EXIT_STALE
        scheduler.expected_code = EXIT_STALE


@pytest.mark.asyncio
async def test_a_gateway_that_has_met_a_newer_scheduler_ends_this_one() -> None:
    """Its stream is refused with FAILED_PRECONDITION and the scheduler exits."""
    async with running_scheduler(FakeExecutor()) as scheduler:
        await scheduler.ready_gateway()
        gateway = await scheduler.gateway(attach=False)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await gateway.attach(highest_term=FUTURE)
        assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert await scheduler.exit_code() == EXIT_STALE
        scheduler.expected_code = EXIT_STALE


@pytest.mark.asyncio
async def test_a_second_scheduler_takes_the_cell_over() -> None:
    """The newer of two schedulers gets the executor; the older exits; a request goes on at the newer without loss."""
    executor = FakeExecutor()
    async with running_scheduler(executor) as older:
        gateway = await older.ready_gateway()
        await gateway.submit(1, PROMPT, 240)
        await gateway.until(lambda: len(gateway.outcomes[1].tokens.get(0, [])) > 5)

        async def resolver(host: str, port: int) -> list[str]:
            return [executor.address]

        async with running_scheduler(resolver=resolver) as newer:
            assert await older.exit_code() == EXIT_STALE
            older.expected_code = EXIT_STALE
            await gateway.ended()
            successor = await newer.gateway(attach=False, incarnation=gateway.incarnation)
            successor.outcomes = gateway.outcomes
            welcome = await successor.attach(live=[1], highest_term=1)
            assert list(welcome.unknown_requests) == [1]
            await successor.until_load(lambda load: len(load.executors) == 1)
            tokens = gateway.outcomes[1].tokens[0]
            resumed = await successor.submit(1, PROMPT, 240, committed=tokens)
            await successor.over(1)
            assert resumed.tokens == {0: expected_tokens(PROMPT, 240)}
