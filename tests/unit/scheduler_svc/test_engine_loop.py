"""The choreography, with a scripted engine in place of the real one: when it is called,
and what becomes of its answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry
from wire_executor import Watched

from octavo.rpc.errors import ServiceError
from scheduler_svc.batch import (
    NO_RESULTS,
    BatchResult,
    Event,
    ExecutorSpec,
    NewSequence,
    RequestDone,
    RowColumns,
    ScheduledBatch,
    TokensOut,
)
from scheduler_svc.engine import Engine
from scheduler_svc.engine_loop import EngineFailedError, EngineLoop
from scheduler_svc.load import ModelPoolView
from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.policies.registry import load_policy
from scheduler_svc.request_record import ChoiceEnd, ChoiceRecord, FinishReason, RequestId, RequestRecord, StoppingParams

REQUEST: RequestId = ("gateway", 1)
OTHER: RequestId = ("gateway", 2)
SPEC = ExecutorSpec("127.0.0.1:1", "e", "tiny", "r", "t", "f", 16, 65, 16, 64, 256, 1000)
STOPPING = StoppingParams(8, 0, frozenset())


def record(request_id: RequestId = REQUEST, age: float = 0.0) -> RequestRecord:
    """A new request of three prompt tokens."""
    return RequestRecord(
        request_id, "label", "tiny", "r", "", (1, 2, 3), None, STOPPING, (ChoiceRecord(),), age, None, ""
    )


class ScriptedEngine(Engine):
    """Answers by script and notes how it was called."""

    def __init__(self) -> None:
        super().__init__(load_policy("fcfs"), 100)  # its script bounds the steps, not their number in flight
        self.called = Watched()
        self.calls: list[str] = []
        self.steps: dict[int, int] = defaultdict(int)
        self.wanted: dict[int, int] = defaultdict(int)
        self.new_sequences: tuple[NewSequence, ...] = ()
        self.events: list[Event] = []
        self.error: Exception | None = None

    def _note(self, call: str) -> list[Event]:
        self.calls.append(call)
        self.called.changed()
        if self.error is not None:
            raise self.error
        events, self.events = self.events, []
        return events

    def submit(self, record: RequestRecord, now: float) -> list[Event]:
        return self._note("submit")

    def cancel(
        self,
        request_id: RequestId,
        choice: int | None = None,
        kept_tokens: int | None = None,
        reason: FinishReason = FinishReason.CANCELLED,
    ) -> list[Event]:
        return self._note("cancel")

    def expire(self, now: float) -> list[Event]:
        return self._note("expire")

    def update(self, session: int, result: BatchResult, now: float) -> list[Event]:
        return self._note(f"update {session}")

    def schedule(self, session: int, now: float) -> ScheduledBatch | None:
        self._note(f"schedule {session}")
        if self.steps[session] >= self.wanted[session]:
            return None
        self.steps[session] += 1
        return ScheduledBatch(session, self.steps[session], (), self.new_sequences, RowColumns.of(()), 0)

    def check_invariants(self) -> None:
        self.calls.append("check")

    def count(self, call: str) -> int:
        return sum(each.startswith(call) for each in self.calls)


class Collector:
    """A publisher that keeps what it is told."""

    def __init__(self) -> None:
        self.published: list[Event] = []

    def publish(self, events: Sequence[Event]) -> None:
        self.published += events


class Link:
    """An executor's link that keeps what it is sent, in one list for all."""

    def __init__(self, sent: list[tuple[int, int]]) -> None:
        self.sent = sent

    def send(self, batch: ScheduledBatch) -> None:
        self.sent.append((batch.session, batch.step))


async def turns(count: int = 20) -> None:
    """Let every task that is ready run, several times."""
    for _ in range(count):
        await asyncio.sleep(0)


@asynccontextmanager
async def looping(engine: Engine, **options: Any) -> AsyncIterator[tuple[EngineLoop, Collector, asyncio.Task[None]]]:
    """Run a loop over an engine; its timer is far away unless told otherwise."""
    collector = Collector()
    loop = EngineLoop(
        engine, collector, SchedulerMetrics(CollectorRegistry()), **({"expire_interval": 1000.0} | options)
    )
    task: asyncio.Task[None] = asyncio.ensure_future(loop.run())  # type: ignore[arg-type]
    await turns()
    yield loop, collector, task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.asyncio
async def test_nothing_happens_while_nothing_happens() -> None:
    """An idle loop does not call the engine: it is not a busy loop."""
    engine = ScriptedEngine()
    async with looping(engine) as (loop, _, _):
        loop.join(SPEC, Link([]))
        await turns()
        engine.calls.clear()
        await turns(500)
        assert engine.calls == []


@pytest.mark.asyncio
async def test_every_kind_of_news_makes_a_round() -> None:
    """A submit, a cancel, a result, a join and a leave each have every session asked for work."""
    engine = ScriptedEngine()
    async with looping(engine) as (loop, _, _):
        session = loop.join(SPEC, Link([]))
        other = loop.join(SPEC, Link([]))
        await turns()
        news = [
            lambda: loop.submit(record()),
            lambda: loop.cancel(REQUEST),
            lambda: loop.apply(session, BatchResult(session, 1, NO_RESULTS)),
            lambda: loop.leave(other),
        ]
        for each in news:
            engine.calls.clear()
            each()
            await turns()
            assert f"schedule {session}" in engine.calls
            assert "expire" in engine.calls


@pytest.mark.asyncio
async def test_time_alone_makes_a_round() -> None:
    """Deadlines and timeouts are looked at although nothing comes in, again and again."""
    engine = ScriptedEngine()
    async with looping(engine, expire_interval=0.001) as (_, collector, _):
        for number in range(1, 4):
            engine.events = [RequestDone(("gateway", number), None)]
            await engine.called.until(lambda: not engine.events)
        await turns()
        assert collector.published == [RequestDone(("gateway", number), None) for number in range(1, 4)]


@pytest.mark.asyncio
async def test_sessions_take_turns() -> None:
    """While several sessions want steps each gets one before any gets its next, and the first place goes round."""
    engine = ScriptedEngine()
    sent: list[tuple[int, int]] = []
    async with looping(engine) as (loop, _, _):
        sessions = [loop.join(SPEC, Link(sent)) for _ in range(3)]
        await turns()
        for session in sessions:
            engine.wanted[session] = 4
        loop.submit(record())
        await turns()
        rounds = [sent[start : start + 3] for start in range(0, 12, 3)]
        assert all({session for session, _ in each} == set(sessions) for each in rounds)
        assert len({each[0][0] for each in rounds}) == 3


@pytest.mark.asyncio
async def test_news_during_a_round_is_not_lost() -> None:
    """What comes in while steps are built is answered by a round after it."""
    engine = ScriptedEngine()
    async with looping(engine) as (loop, _, _):

        class Echo(Link):
            def send(self, batch: ScheduledBatch) -> None:
                super().send(batch)
                if batch.step < 50:
                    engine.wanted[batch.session] += 1
                    loop.apply(batch.session, BatchResult(batch.session, batch.step, NO_RESULTS))

        sent: list[tuple[int, int]] = []
        session = loop.join(SPEC, Echo(sent))
        engine.wanted[session] = 1
        loop.submit(record())
        await turns(400)
        assert [step for _, step in sent] == list(range(1, 51))


@pytest.mark.asyncio
async def test_a_silent_cancel_hides_its_own_events_only() -> None:
    """Events of other requests that the engine hands out along with a cancel's are published all the same."""
    engine = ScriptedEngine()
    async with looping(engine) as (loop, collector, _):
        own = [TokensOut(REQUEST, 0, 0, (), None, ChoiceEnd(FinishReason.CANCELLED)), RequestDone(REQUEST, None)]
        engine.events = [*own, RequestDone(OTHER, None)]
        assert loop.cancel(REQUEST, publish=False)
        assert collector.published == [RequestDone(OTHER, None)]
        engine.events = [RequestDone(OTHER, None)]
        assert not loop.cancel(REQUEST)
        engine.events = list(own)
        assert loop.cancel(REQUEST)
        assert collector.published[2:] == own


@pytest.mark.asyncio
async def test_pools_are_told_on_every_change() -> None:
    """Each watcher learns of a join and of a leave."""
    engine = ScriptedEngine()
    async with looping(engine) as (loop, _, _):
        told: list[list[ModelPoolView]] = []
        loop.watch_pools(lambda pools: told.append(list(pools)))
        session = loop.join(SPEC, Link([]))
        loop.leave(session)
        assert [[pool.model for pool in pools] for pools in told] == [["tiny"], []]


@pytest.mark.asyncio
async def test_a_refusal_is_no_failure() -> None:
    """A ServiceError goes to who asked; the loop runs on."""
    engine = ScriptedEngine()
    async with looping(engine) as (loop, _, task):
        engine.error = ServiceError(grpc.StatusCode.NOT_FOUND, "NO_MODEL", "no such model")
        with pytest.raises(ServiceError):
            loop.submit(record())
        engine.error = None
        loop.submit(record())
        await turns()
        assert not task.done()


@pytest.mark.asyncio
@pytest.mark.parametrize("where", ["submit", "cancel", "apply", "run"])
async def test_a_failure_anywhere_ends_the_loop(where: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever calls gets EngineFailedError, and so does everyone after; it is logged once, with what it was about."""
    engine = ScriptedEngine()
    async with looping(engine) as (loop, _, task):
        session = loop.join(SPEC, Link([]))
        engine.wanted[session] = 1
        loop.submit(record())
        await turns()
        engine.error = IndexError("off the end")
        calls = {
            "submit": lambda: loop.submit(record(OTHER)),
            "cancel": lambda: loop.cancel(REQUEST),
            "apply": lambda: loop.apply(session, BatchResult(session, 1, NO_RESULTS)),
        }
        if where == "run":
            loop._wake.set()
        else:
            with pytest.raises(EngineFailedError, match="off the end"):
                calls[where]()
        await turns()
        with pytest.raises(EngineFailedError):
            task.result()
        engine.error = None
        with pytest.raises(EngineFailedError):
            loop.load()
        loop.leave(session)
        [logged] = [each for each in caplog.records if each.levelno == logging.CRITICAL]
        if where == "apply":
            assert f"ScheduledBatch(session={session}, step=1" in logged.fields["batch"]  # type: ignore[attr-defined]


@pytest.mark.asyncio
async def test_invariants_are_checked_once_when_it_turns_idle() -> None:
    """Not while steps are on their way, and not again at every tick of the clock."""
    engine = ScriptedEngine()
    async with looping(engine, expire_interval=0.001) as (loop, _, _):
        session = loop.join(SPEC, Link([]))
        await turns()
        engine.calls.clear()
        engine.wanted[session] = 1
        loop.submit(record())
        await turns()
        assert engine.count("check") == 0
        loop.apply(session, BatchResult(session, 1, NO_RESULTS))
        await turns()
        assert engine.count("check") == 1
        await engine.called.until(lambda: engine.count("expire") >= 10)
        assert engine.count("check") == 1


@pytest.mark.asyncio
async def test_invariants_are_checked_after_every_event_where_asked() -> None:
    """Each call that can change anything is followed by a check."""
    engine = ScriptedEngine()
    async with looping(engine, check_invariants=True) as (loop, _, _):
        for change in (lambda: loop.submit(record()), lambda: loop.cancel(REQUEST)):
            engine.calls.clear()
            change()
            assert engine.calls[-1] == "check"


@pytest.mark.asyncio
async def test_a_request_leaves_two_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    """One when it is accepted and one when it ends, with its id, reasons, token counts and times."""
    engine = ScriptedEngine()
    now = 100.0
    with caplog.at_level(logging.INFO, logger="scheduler_svc"):
        async with looping(engine, clock=lambda: now) as (loop, _, _):
            session = loop.join(SPEC, Link([]))
            await turns()
            loop.submit(record(age=1.5))
            loop.submit(record(age=1.5))
            now = 102.0
            engine.new_sequences = (NewSequence(REQUEST, 1, (1, 2, 3), 3, 0, None, STOPPING),)
            engine.wanted[session] = 1
            loop.cancel(OTHER)
            await turns()
            now = 103.0
            engine.events = [TokensOut(REQUEST, 0, 0, (7,), None, None)]
            loop.apply(session, BatchResult(session, 1, NO_RESULTS))
            now = 105.0
            engine.events = [
                TokensOut(REQUEST, 0, 1, (8,), None, ChoiceEnd(FinishReason.LENGTH)),
                RequestDone(REQUEST, None, 2),
            ]
            loop.apply(session, BatchResult(session, 2, NO_RESULTS))
            loop.submit(record(OTHER))
            error = ServiceError(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "too late")
            engine.events = [RequestDone(OTHER, error)]
            loop.cancel(OTHER)
    lines = [(each.message, each.fields) for each in caplog.records]  # type: ignore[attr-defined]
    assert [message for message, _ in lines] == [
        "request accepted",
        "request finished",
        "request accepted",
        "request failed",
    ]
    accepted, finished, _, failed = [fields for _, fields in lines]
    assert accepted["request_id"] == finished["request_id"] == "gateway-1"
    assert (accepted["prompt_tokens"], accepted["age"], accepted["label"]) == (3, 1.5, "label")
    assert (finished["reasons"], finished["completion_tokens"]) == (["length"], 2)
    assert (finished["queue_seconds"], finished["first_token_seconds"], finished["seconds"]) == (3.5, 4.5, 6.5)
    assert (failed["request_id"], failed["code"], failed["queue_seconds"]) == ("gateway-2", "DEADLINE_EXCEEDED", None)
