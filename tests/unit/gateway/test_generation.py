"""The life of one request between client and scheduler, without either: what is sent when, and what is left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from prepared_samples import MakePrepared

from gateway.cell import Cell, Pool
from gateway.choice_reader import MAX_DELTA_TOKENS
from gateway.generator import Generator
from gateway.live_request import LiveRequest
from gateway.live_requests import LiveRequests
from gateway.metrics import GatewayMetrics
from gateway.requests import (
    CancelReason,
    ChoiceEnd,
    ChoiceFinished,
    Delta,
    Event,
    FinishReason,
    GenerateCommand,
    Started,
    TextInput,
    Usage,
)
from gateway.resume_tokens import ResumeTokens
from gateway.scheduler_client import OnTakenUp
from gateway.served_models import ServedModel, ServedModels
from gateway.tokenizer import LONG_TEXT
from octavo.rpc.errors import ServiceError

STOP = ChoiceEnd(FinishReason.STOP, stop_token_id=1)
COMMAND = GenerateCommand(input=TextInput("the cat"))
LONG_COMMAND = GenerateCommand(input=TextInput("a" * LONG_TEXT))


@dataclass
class RecordingScheduler:
    """Notes what it is told."""

    submitted: list[LiveRequest] = field(default_factory=list)
    cancelled: list[tuple[int, CancelReason]] = field(default_factory=list)
    stopped: list[tuple[int, int, int]] = field(default_factory=list)

    def submit(self, request: LiveRequest) -> None:
        """Note a request."""
        self.submitted.append(request)

    def cancel(self, request: LiveRequest, reason: CancelReason) -> None:
        """Note a cancel."""
        self.cancelled.append((request.counter, reason))

    def stop_choice(self, request: LiveRequest, choice: int) -> None:
        """Note the end of a choice by its text."""
        self.stopped.append((request.counter, choice, len(request.choices[choice].token_ids)))

    def take_up(self, counter: int, first_id: tuple[str, int], tenant: str, on_taken_up: OnTakenUp) -> None:
        """Nothing can be taken up here."""
        raise NotImplementedError

    def cancel_counter(self, counter: int) -> None:
        """Nor ended by its counter."""
        raise NotImplementedError


class Bench:
    """A generator with everything around it."""

    def __init__(self, make_prepared: MakePrepared) -> None:
        self.clock = asyncio.get_running_loop().time
        self.executor = ThreadPoolExecutor(1)
        model = self._model = ServedModel.open(make_prepared(chat_template=None), self.executor)
        self.metrics = GatewayMetrics([model.name])
        self.live = LiveRequests("cd" * 16, self.clock, self.metrics)
        self.scheduler = RecordingScheduler()
        cell = Cell()
        cell.attach()
        cell.set_pools({model.name: Pool(model.name, model.prepared.revision, 1, 4096)})
        tokens = ResumeTokens("k" * 16, "default")
        models = ServedModels([model])
        self.generator = Generator(models, self.live, cell, self.scheduler, self.metrics, self.clock, tokens)

    async def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return await self._model.tokenizer.encode(text, add_special_tokens=False)

    def apply(self, tokens: list[int], end: ChoiceEnd | None = None) -> None:
        """Let the scheduler's latest request have its first tokens."""
        self.live.apply(self.scheduler.submitted[-1].counter, 0, 0, tokens, None, end)


@pytest_asyncio.fixture
async def bench(make_prepared: MakePrepared) -> AsyncIterator[Bench]:
    """A generator; nothing is live when the test is over."""
    made = Bench(make_prepared)
    yield made
    made.executor.shutdown()
    assert len(made.live) == 0
    made.live.check_invariants()


@pytest.mark.asyncio
async def test_complete_request_is_not_cancelled(bench: Bench) -> None:
    """A request that is complete has all its events, and its end is the scheduler's last word (B5)."""
    async with bench.generator.generate(COMMAND) as generation:
        bench.apply([5, 1], STOP)
        events = await generation.next_events()
        assert [type(event) for event in events] == [Started, Delta, ChoiceFinished, Usage]
        assert await generation.next_events() == []
    assert bench.scheduler.cancelled == []


@pytest.mark.asyncio
async def test_nothing_is_told_before_the_scheduler_has_it(bench: Bench) -> None:
    """Started waits for the scheduler's acceptance, so that a refusal is the first and only answer."""
    async with bench.generator.generate(COMMAND) as generation:
        waiting = asyncio.create_task(generation.next_events())
        await asyncio.sleep(0)
        assert not waiting.done()
        bench.live.confirm(bench.scheduler.submitted[0].counter, 0)
        (started,) = await waiting
        assert isinstance(started, Started)
    assert [reason for _, reason in bench.scheduler.cancelled] == [CancelReason.CLIENT]


@pytest.mark.asyncio
async def test_tokens_that_came_together_are_one_delta(bench: Bench) -> None:
    """A reader that comes late gets all that the record has in one delta per choice."""
    async with bench.generator.generate(COMMAND) as generation:
        for index in range(5):
            bench.live.apply(bench.scheduler.submitted[0].counter, 0, index, [70 + index], None, None)
        events = await generation.next_events()
        assert [type(event) for event in events] == [Started, Delta]
        assert isinstance(events[1], Delta)
        assert list(events[1].token_ids) == [70, 71, 72, 73, 74]


@pytest.mark.asyncio
async def test_who_wants_all_at_once_is_woken_at_the_end(bench: Bench) -> None:
    """Tokens before the last wake nobody; all events come together; after that every change counts again."""
    async with bench.generator.generate(COMMAND) as generation:
        waiting = asyncio.create_task(generation.all_events())
        await asyncio.sleep(0)
        request = bench.scheduler.submitted[0]
        for index in range(300):
            bench.live.apply(request.counter, 0, index, [70], None, None)
            assert not request.changed.is_set()
        bench.live.apply(request.counter, 0, 300, [1], None, STOP)
        events = await waiting
        assert [type(event) for event in events] == [Started, Delta, Delta, ChoiceFinished, Usage]
        deltas = [event for event in events if isinstance(event, Delta)]
        assert [token for delta in deltas for token in delta.token_ids] == [70] * 300 + [1]
        assert await generation.all_events() == []


@pytest.mark.asyncio
async def test_who_wants_all_at_once_gets_an_error_at_once(bench: Bench) -> None:
    """And text still ends a choice as soon as it holds a stop string."""
    async with bench.generator.generate(COMMAND) as generation:
        waiting = asyncio.create_task(generation.all_events())
        await asyncio.sleep(0)
        bench.apply([70])
        bench.live.fail(bench.scheduler.submitted[0].counter, ServiceError(grpc.StatusCode.ABORTED, "LOST", "lost"))
        with pytest.raises(ServiceError, match="lost"):
            await waiting
    command = GenerateCommand(input=TextInput("the cat"), stop=["a"])
    async with bench.generator.generate(command) as generation:
        waiting = asyncio.create_task(generation.all_events())
        await asyncio.sleep(0)
        (token,) = await bench.encode("a")
        bench.apply([token, token])
        events = await waiting
        finished = [event for event in events if isinstance(event, ChoiceFinished)]
        assert [each.end.stop_string for each in finished] == ["a"]
    assert bench.scheduler.stopped == [(bench.scheduler.submitted[-1].counter, 0, 1)]


@pytest.mark.asyncio
async def test_reader_far_behind(bench: Bench) -> None:
    """A reader that is thousands of tokens late gets deltas of a bounded size, no gap, and then the end."""
    output = [70 + index % 20 for index in range(1000)]
    async with bench.generator.generate(COMMAND) as generation:
        bench.apply([*output, 1], STOP)
        events: list[Event] = []
        while batch := await generation.next_events():
            events += batch
        deltas = [event for event in events if isinstance(event, Delta)]
        assert [type(event) for event in events] == [Started, *[Delta] * len(deltas), ChoiceFinished, Usage]
        assert [token for delta in deltas for token in delta.token_ids] == [*output, 1]
        assert [delta.first_token_index for delta in deltas] == list(range(0, 1001, MAX_DELTA_TOKENS))
        assert max(len(delta.token_ids) for delta in deltas) == MAX_DELTA_TOKENS


@pytest.mark.asyncio
async def test_deadline_that_has_passed(bench: Bench) -> None:
    """A request that comes too late is never submitted."""
    with pytest.raises(ServiceError) as raised:
        async with bench.generator.generate(COMMAND, deadline=bench.clock() - 1):
            pytest.fail("must not begin")
    assert raised.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert bench.scheduler.submitted == []


@pytest.mark.asyncio
async def test_deadline_while_waiting(bench: Bench) -> None:
    """The gateway ends a request at its deadline by itself, whatever it waits for, and says why to both sides."""
    with pytest.raises(ServiceError) as raised:
        async with bench.generator.generate(COMMAND, deadline=bench.clock() + 0.2):
            await asyncio.Event().wait()
    assert raised.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert [reason for _, reason in bench.scheduler.cancelled] == [CancelReason.DEADLINE]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("seconds_left", "reason"), [(0.01, CancelReason.DEADLINE), (1.2, CancelReason.DEADLINE), (30, CancelReason.CLIENT)]
)
async def test_cancel_just_before_the_deadline(bench: Bench, seconds_left: float, reason: CancelReason) -> None:
    """A client whose own timer fired a little before ours ran out of time; one that cancels long before did not."""

    async def run() -> None:
        async with bench.generator.generate(COMMAND, deadline=bench.clock() + 60):
            bench.scheduler.submitted[0].deadline = bench.clock() + seconds_left
            bench.scheduler.submitted[0].accepted_at = bench.clock() - 60
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await run()
    assert [each for _, each in bench.scheduler.cancelled] == [reason]


@pytest.mark.asyncio
async def test_body_that_fails(bench: Bench) -> None:
    """A handler that breaks cancels its request like a client that leaves."""
    with pytest.raises(RuntimeError, match="broken"):
        async with bench.generator.generate(COMMAND):
            raise RuntimeError("broken")
    assert [reason for _, reason in bench.scheduler.cancelled] == [CancelReason.CLIENT]


@pytest.mark.asyncio
async def test_write_to_a_client_that_left(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """A write that fails because its client has gone is logged as what it is, and cancels the request (B12)."""
    caplog.set_level("INFO", logger="gateway")
    with pytest.raises(grpc.aio.InternalError):
        async with bench.generator.generate(COMMAND):
            raise grpc.aio.InternalError
    assert [reason for _, reason in bench.scheduler.cancelled] == [CancelReason.CLIENT]
    fields = caplog.records[-1].fields  # type: ignore[attr-defined]
    assert (fields["outcome"], fields["reason"], fields["error"]) == ("cancelled", "client", None)


@pytest.mark.asyncio
@pytest.mark.parametrize("ending", ["cancel", "close", "deadline"])
async def test_end_while_the_prompt_is_tokenized(bench: Bench, ending: str) -> None:
    """A request whose client, gateway or time is gone before its prompt has tokens is never submitted (B2)."""
    release = threading.Event()
    bench.executor.submit(release.wait)
    deadline = bench.clock() + 0.02 if ending == "deadline" else None

    async def run() -> None:
        async with bench.generator.generate(LONG_COMMAND, deadline=deadline):
            pytest.fail("must not begin")

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    if ending == "cancel":
        task.cancel()
    elif ending == "close":
        bench.live.close()
        release.set()
    (result,) = await asyncio.gather(task, return_exceptions=True)
    release.set()
    if ending == "cancel":
        assert isinstance(result, asyncio.CancelledError)
    else:
        assert isinstance(result, ServiceError)
        assert result.reason == {"close": "SHUTTING_DOWN", "deadline": "DEADLINE"}[ending]
    assert bench.scheduler.submitted == []
    assert bench.scheduler.cancelled == []
