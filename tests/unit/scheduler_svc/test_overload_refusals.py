"""Ten times more than a cell can do, on a clock of its own: who is refused hears so from the gateway, not a round trip
later, and the executor has no less to do than without that.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial

import pytest
from cells import Cell as SchedulerCell
from cells import make_cell
from fakes import MODEL, make_record, make_spec

from gateway.cell import Cell
from octavo.rpc.errors import ServiceError
from scheduler_svc.full_queues import FullQueues
from scheduler_svc.queue_bound import QueueBound

ROWS = WAITING = 8
TICK = 0.001
TICKS_A_STEP = 3
DELAY = 4
"""Ticks from a gateway to the scheduler, and back."""
LENGTH = 3
"""Tokens of a prompt."""


@dataclass
class Side:
    """A gateway, and what is on its way in either direction: when it arrives, and what."""

    cell: Cell = field(default_factory=Cell)
    submitted: deque[tuple[int, int]] = field(default_factory=deque)
    frames: deque[tuple[int, partial[None]]] = field(default_factory=deque)


class Overload:
    """Gateways, the scheduler and one executor, tick by tick. Answers go before reports, as on the stream."""

    def __init__(self, num_gateways: int, max_tokens: int, *, tells: bool = True) -> None:
        spec = make_spec(max_num_seqs=ROWS, num_blocks=513)
        self._scheduler: SchedulerCell = make_cell(spec, queue_bound=QueueBound(WAITING))
        self._queues = FullQueues(
            lambda model: self._scheduler.engine.full_queue(model, self._scheduler.now), lambda: self._scheduler.now
        )
        self._sides = [Side() for _ in range(num_gateways)]
        self._max_tokens = max_tokens
        self._tells = tells
        self._tick = self._counter = 0
        self.refused_by_gateway: Counter[int] = Counter()
        self.refused_by_scheduler: Counter[int] = Counter()

    @property
    def num_finished(self) -> int:
        """Requests that have ended well."""
        return self._scheduler.engine.load().num_finished

    def run(self, ticks: int, arrivals: int) -> None:
        """Let time pass, with so many requests at each tick, one gateway after the other."""
        for _ in range(ticks):
            for side in self._sides:
                while side.frames and side.frames[0][0] <= self._tick:
                    side.frames.popleft()[1]()
            for _ in range(arrivals):
                self._counter += 1
                self._ask(self._sides[self._counter % len(self._sides)])
            for side in self._sides:
                while side.submitted and side.submitted[0][0] <= self._tick:
                    self._take(side, side.submitted.popleft()[1])
            if self._tick % TICKS_A_STEP == 0:
                self._scheduler.round()
                self._report(only_changes=True)
            self._tick += 1
            self._scheduler.now += TICK

    def _ask(self, side: Side) -> None:
        try:
            side.cell.check_room(MODEL, 1, LENGTH)
        except ServiceError:
            self.refused_by_gateway[self._tick] += 1
            return
        side.cell.note_submitted(self._counter, MODEL, 1, LENGTH)
        side.submitted.append((self._tick + DELAY, self._counter))

    def _take(self, side: Side, counter: int) -> None:
        try:
            self._scheduler.submit(make_record(counter, prompt=[1] * LENGTH, max_tokens=self._max_tokens))
        except ServiceError:
            self.refused_by_scheduler[self._tick] += 1
            self._queues.note_refusal(MODEL, 1, LENGTH)
            side.frames.append((self._tick + DELAY, partial(side.cell.note_rejected, counter)))
        else:
            side.frames.append((self._tick + DELAY, partial(side.cell.note_accepted, counter)))
        self._report(only_changes=False)

    def _report(self, *, only_changes: bool) -> None:
        if self._tells and (self._queues.look() or (self._queues.queues and not only_changes)):
            for side in self._sides:
                told = partial(side.cell.set_full_queues, dict(self._queues.queues))
                side.frames.append((self._tick + DELAY, told))


@pytest.mark.parametrize(("max_tokens", "least"), [(2, 0.5), (6, 0.95), (40, 0.95)])
def test_one_gateway_refuses_all_by_itself(max_tokens: int, least: float) -> None:
    """All rows end in the same step, so the queue is empty again and again. Behind the first requests, which come
    before anything was told, the scheduler has to refuse none; and the executor gets `least` of what it gets through
    where gateways are told nothing, all of it but where a whole queue is served within a round trip.
    """
    ticks, start = 400, 6 * DELAY
    overload, untold = Overload(1, max_tokens), Overload(1, max_tokens, tells=False)
    for each in (overload, untold):
        each.run(ticks, 20)
    late = sum(count for tick, count in overload.refused_by_scheduler.items() if tick > start)
    assert late == 0, overload.refused_by_scheduler
    assert sum(overload.refused_by_gateway.values()) > 4_000
    assert sum(untold.refused_by_scheduler.values()) > 4_000
    assert overload.num_finished >= least * untold.num_finished > 0
