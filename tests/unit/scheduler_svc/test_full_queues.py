"""What gateways are told of full queues: as much as the engine itself would refuse, and no longer than it would."""

from __future__ import annotations

import random

import pytest
from cells import make_cell
from fakes import make_record, make_spec
from wire_executor import FakeExecutor
from wire_gateway import FakeGateway
from wire_scheduler import running_scheduler

from gateway.scheduler_convert import full_queues_from
from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.rpc.errors import ServiceError
from octavo.rpc.full_queue import FullQueue
from scheduler_svc.full_queues import HOLD, FullQueues
from scheduler_svc.load_convert import load_report_frame
from scheduler_svc.queue_bound import QueueBound
from scheduler_svc.request_record import ChoiceRecord


@pytest.mark.parametrize("bound", [QueueBound(5), QueueBound(None, 40), QueueBound(4, 30)], ids=str)
def test_a_gateway_that_was_told_refuses_what_the_engine_would(bound: QueueBound) -> None:
    """At any moment of a random load over two executors: what does not fit a queue that is told would be refused. Where
    no row is free it fits exactly what gets in, and the error is the engine's own, numbers and delay included.
    """
    chance = random.Random(7)
    cell = make_cell(make_spec(max_num_seqs=2, num_blocks=16), make_spec(max_num_seqs=3), queue_bound=bound)
    num_told = num_told_with_rows_free = num_refused = 0
    for counter in range(1, 1500):
        choices, length = chance.randint(1, 3), chance.randint(1, 12)
        record = make_record(
            counter, prompt=[1] * length, choices=[ChoiceRecord()] * choices, max_tokens=chance.randint(1, 9)
        )
        queue = cell.engine.full_queue(record.model, cell.now)
        executors = cell.engine._placement.executors.values()
        is_exact = all(each.drain.has_left_over or len(each.running) == each.max_running for each in executors)
        error = None
        try:
            cell.submit(record)
        except ServiceError as refused:
            error = refused
            num_refused += 1
        if queue is not None and not is_exact:
            num_told_with_rows_free += 1
            assert queue.fits(choices, length) or error is not None
        elif queue is not None:
            num_told += 1
            assert queue.fits(choices, length) == (error is None)
            if error is not None:
                told = queue.refusal(choices, length)
                assert (told.message, told.metadata, told.retry_delay) == (
                    error.message,
                    error.metadata,
                    error.retry_delay,
                )
        if chance.random() < 0.5:
            cell.round()
            cell.now += 0.1
    assert num_told > 300
    assert num_told_with_rows_free > 20 or bound.max_waiting is None
    assert num_refused > 100


def test_free_rows_are_places_and_an_idle_executor_takes_anything() -> None:
    """An executor with nothing to do takes whoever comes first; nothing is told without an executor or a bound."""
    cell = make_cell(make_spec(max_num_seqs=1), depth=1, queue_bound=QueueBound(1))
    assert cell.engine.full_queue("other", cell.now) is None
    model = make_record(1).model
    idle = cell.engine.full_queue(model, cell.now)
    assert idle == FullQueue(-1, 0, 1, None, is_idle=True)
    assert idle.fits(100, 100)
    # Whoever comes behind that one finds what it leaves.
    assert idle.plus(1, 3).fits(1, 3)
    assert not idle.plus(1, 3).fits(2, 3)
    assert not idle.plus(100, 100).fits(1, 3)
    cell.submit(make_record(1, max_tokens=50))
    # No step was built yet: the row is free, and one waits.
    assert cell.engine.full_queue(model, cell.now) == FullQueue(0, 3, 1, None)
    cell.schedule()
    assert cell.engine.full_queue(model, cell.now) == FullQueue(0, 0, 1, None)
    unbound = make_cell(make_spec(max_num_seqs=1), depth=1)
    unbound.submit(make_record(1))
    unbound.schedule()
    assert unbound.engine.full_queue(model, cell.now) is None


class Clock:
    """A time that is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_queue_is_told_from_a_refusal_on_until_it_has_been_half_empty_for_a_while() -> None:
    """Nothing before anybody was refused; a change each time that the numbers change; nothing once the refused would
    have got in, and half of the places were free, for HOLD without a break.
    """
    state: dict[str, FullQueue | None] = {"m": FullQueue(3, 9, 3, None)}
    clock = Clock()
    queues = FullQueues(state.__getitem__, clock)
    assert not queues.look()
    assert not queues.queues
    queues.note_refusal("m", 2, 3)
    assert queues.look()
    assert queues.queues == {"m": FullQueue(3, 9, 3, None)}
    assert not queues.look()
    # One would get in, but not who was refused; or that one too, but so would the next: time does not run yet.
    for refused, left in ((2, 2), (1, 2)):
        queues.note_refusal("m", refused, 3)
        state["m"] = FullQueue(left, 3 * left, 3, None)
        queues.look()
        clock.now += 10 * HOLD
        queues.look()
        assert queues.queues == {"m": FullQueue(left, 3 * left, 3, None)}
    state["m"] = FullQueue(1, 3, 3, None)
    assert queues.look()
    clock.now += 0.9 * HOLD
    assert not queues.look()
    # Full again for a moment: from the beginning.
    state["m"] = FullQueue(3, 9, 3, None)
    assert queues.look()
    state["m"] = FullQueue(1, 3, 3, None)
    assert queues.look()
    clock.now += 0.9 * HOLD
    assert not queues.look()
    assert queues.queues == {"m": FullQueue(1, 3, 3, None)}
    clock.now += 0.2 * HOLD
    assert queues.look()
    assert not queues.queues
    state["m"] = FullQueue(3, 9, 3, None)
    assert not queues.look()
    assert not queues.queues


def test_a_queue_of_which_nothing_is_known_for_a_moment_is_told_again_without_a_refusal() -> None:
    """Nothing is told then, and right behind it the queue is."""
    state: dict[str, FullQueue | None] = {"m": FullQueue(3, 9, 3, None)}
    clock = Clock()
    queues = FullQueues(state.__getitem__, clock)
    queues.note_refusal("m", 1, 3)
    assert queues.look()
    state["m"] = None
    assert queues.look()
    assert not queues.queues
    clock.now += 0.9 * HOLD
    state["m"] = FullQueue(-1, 0, 3, None)
    assert queues.look()
    assert queues.queues == {"m": FullQueue(-1, 0, 3, None)}
    clock.now += 0.2 * HOLD
    assert queues.look()
    assert not queues.queues


@pytest.mark.parametrize("rows_free", [0, 3])
def test_free_rows_are_places(rows_free: int) -> None:
    """On the wire as in the engine: what is told fits three more where three rows are free."""
    queue = FullQueue(2 - rows_free, 6, 4, None, (1.0, 2.0), is_idle=bool(rows_free))
    frame = load_report_frame(make_cell().engine.load(), 1, {"m": queue}, is_stalled=False)
    [told] = frame.load_report.full_queues
    assert told.num_choices - told.num_free_rows == 2 - rows_free
    [heard] = full_queues_from(frame.load_report).values()
    assert (heard, heard.drained) == (queue, queue.drained)
    behind_one = heard.plus(1, 1)
    assert behind_one.fits(1 + rows_free, 1)
    assert not behind_one.fits(2 + rows_free, 1)


def full_queues(gateway: FakeGateway) -> list[list[scheduler_pb2.FullQueue]]:
    """Return what each LoadReport told."""
    return [list(f.load_report.full_queues) for f in gateway.frames if f.WhichOneof("frame") == "load_report"]


@pytest.mark.asyncio
async def test_every_gateway_is_told_at_once() -> None:
    """One row, one place: the third request is refused, and both gateways hear of the queue, and hear again when its
    place is free.
    """
    executor = FakeExecutor(max_num_seqs=1)
    async with running_scheduler(executor, max_waiting=1) as scheduler:
        gateway = await scheduler.ready_gateway()
        other = await scheduler.gateway()
        executor.hold()
        await gateway.submit(1, [5, 6, 7], 4)
        await gateway.until_load(lambda load: load.num_running == 1)
        await gateway.submit(2, [5, 6], 4)
        refused = await gateway.submit(3, [5, 6, 8], 4)
        await gateway.over(3)
        assert refused.rejected is not None
        assert refused.rejected.reason == "QUEUE_FULL"
        for each in (gateway, other):
            await each.until(lambda: any(full_queues(each)))  # noqa: B023 - it ends within the turn
            [queue] = next(queues for queues in full_queues(each) if queues)
            assert (queue.num_choices, queue.num_tokens, queue.max_choices) == (1, 2, 1)
            assert queue.max_tokens == 1_000_000
        executor.release()
        await gateway.over(1, 2)
        for each in (gateway, other):
            await each.until(lambda: not full_queues(each)[-1])  # noqa: B023 - it ends within the turn
