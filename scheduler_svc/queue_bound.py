"""How much may wait, and when to come again for who is refused.

What waits is what an executor could not take at once: a burst on an idle cell is no queue, however small the bound, and
an executor with nothing to do refuses nobody. Work that a scheduler had accepted before is owed an ending and always
gets in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from octavo.rpc.full_queue import FullQueue
from scheduler_svc.executor_state import ExecutorState
from scheduler_svc.sequence import LiveRequest
from scheduler_svc.sequence import Sequence as Choice


class _Waiting(NamedTuple):
    choices: int
    tokens: int

    def plus(self, other: _Waiting) -> _Waiting:
        return _Waiting(self.choices + other.choices, self.tokens + other.tokens)


@dataclass(frozen=True)
class QueueBound:
    """Most choices, and most tokens of choices, that wait for the executors of one model. None: no bound."""

    max_waiting: int | None = None
    max_waiting_tokens: int | None = None

    def check(
        self,
        request: LiveRequest,
        target: ExecutorState | None,
        pool: Sequence[ExecutorState],
        orphans: Iterable[Choice],
        now: float,
    ) -> None:
        """Raise RESOURCE_EXHAUSTED, with the numbers and a delay, where a request would make too much wait.

        `request` is not placed yet, and would be at `target`; `pool` are the executors of its model, `orphans` wait for
        an executor of any.
        """
        if request.record.is_resumed or self._is_none:
            return
        first = request.sequences[0]
        if target is None or not (target.running or target.waiting):
            return
        count, num_tokens = len(request.sequences), first.num_tokens
        would_wait = _waiting_orphans(request.record.model, orphans)
        for executor in pool:
            would_wait = would_wait.plus(_waiting_with(executor, first, count if executor is target else 0))
        # Some of the newcomers may go right through, and then fewer wait beside them than before.
        queue = self._queue(_Waiting(would_wait.choices - count, would_wait.tokens - count * num_tokens), pool, now)
        if not queue.fits(count, num_tokens):
            raise queue.refusal(count, num_tokens)

    def full_queue(
        self, model: str, pool: Sequence[ExecutorState], orphans: Iterable[Choice], now: float
    ) -> FullQueue | None:
        """Return a model's queue: whoever does not fit it, `check` would refuse now.

        Where no row is free it is exact. Else as many choices count less as rows are free: by blocks more may be left
        to wait, and of tokens nothing is said. None where nothing is bound, or nothing that is known while rows are
        free. Arguments as for `check`.
        """
        if self._is_none or not pool:
            return None
        waiting = _waiting_orphans(model, orphans)
        for executor in pool:
            waiting = waiting.plus(_Waiting(len(executor.waiting), executor.num_queued_tokens))
        free = sum(map(_num_free_rows, pool))
        if not free:
            return self._queue(waiting, pool, now)
        if self.max_waiting is None:
            return None
        is_idle = not all(executor.running or executor.waiting for executor in pool)
        queue = self._queue(_Waiting(waiting.choices - free, waiting.tokens), pool, now)
        return replace(queue, max_tokens=None, is_idle=is_idle)

    @property
    def _is_none(self) -> bool:
        return self.max_waiting is None and self.max_waiting_tokens is None

    def _queue(self, waiting: _Waiting, pool: Sequence[ExecutorState], now: float) -> FullQueue:
        measured = [rates for executor in pool if (rates := executor.drain.rates(now)) is not None]
        choices, tokens = (sum(rates) for rates in zip(*measured, strict=True)) if measured else (0.0, 0.0)
        drained = (choices, tokens) if measured else None
        return FullQueue(waiting.choices, waiting.tokens, self.max_waiting, self.max_waiting_tokens, drained)


def _num_free_rows(executor: ExecutorState) -> int:
    """How many choices may go right through at most: none where the last step has left others."""
    return 0 if executor.drain.has_left_over else executor.max_running - len(executor.running)


def _waiting_orphans(model: str, orphans: Iterable[Choice]) -> _Waiting:
    mine = [each for each in orphans if each.request.record.model == model]
    return _Waiting(len(mine), sum(each.num_tokens for each in mine))


def _waiting_with(executor: ExecutorState, first: Choice, count: int) -> _Waiting:
    """Return what would wait at an executor with `count` choices like `first` queued there too."""
    choices = len(executor.waiting) + count
    tokens = executor.num_queued_tokens + count * first.num_tokens
    if executor.drain.has_left_over or not choices:
        return _Waiting(choices, tokens)
    # The last step left nobody, so of those that came since some go right through: as many as rows are idle, and as
    # blocks are there for, each taken to need what they need on average, and to leave one for each admitted before.
    needed = executor.num_queued_blocks + count * executor.kv.blocks_needed(first, first.num_tokens) + choices
    room = max(0, executor.kv.num_available_blocks - len(executor.running) + 1)
    left = choices - min(choices, executor.max_running - len(executor.running), choices * room // needed)
    return _Waiting(left, tokens * left // choices)
