"""How much may wait, and when to come again for who is refused.

What waits is what an executor could not take at once: a burst on an idle cell is no queue, however small the bound, and
an executor with nothing to do refuses nobody. Work that a scheduler had accepted before is owed an ending and always
gets in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import grpc

from octavo.rpc.errors import ServiceError
from scheduler_svc.drain_rate import LONGEST_WAIT, SHORTEST_WAIT
from scheduler_svc.executor_state import ExecutorState
from scheduler_svc.placement import least_loaded
from scheduler_svc.request_errors import RETRY_DELAY
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

    def check(self, request: LiveRequest, pool: Sequence[ExecutorState], orphans: Iterable[Choice], now: float) -> None:
        """Raise RESOURCE_EXHAUSTED, with the numbers and a delay, where a request would make too much wait.

        `request` is not placed yet; `pool` are the executors of its model, `orphans` wait for an executor of any.
        """
        if request.record.is_resumed or (self.max_waiting is None and self.max_waiting_tokens is None):
            return
        first = request.sequences[0]
        target = least_loaded(pool, first)
        if target is None or not (target.running or target.waiting):
            return
        count, num_tokens = len(request.sequences), first.num_tokens
        mine = [each for each in orphans if each.request.record.model == request.record.model]
        would_wait = _Waiting(len(mine), sum(each.num_tokens for each in mine))
        for executor in pool:
            would_wait = would_wait.plus(_waiting_with(executor, first, count if executor is target else 0))
        excess = _Waiting(
            0 if self.max_waiting is None else max(0, would_wait.choices - self.max_waiting),
            0 if self.max_waiting_tokens is None else max(0, would_wait.tokens - self.max_waiting_tokens),
        )
        if excess.choices or excess.tokens:
            raise self._full(_Waiting(count, count * num_tokens), would_wait, excess, pool, now)

    def _full(
        self, wanted: _Waiting, would_wait: _Waiting, excess: _Waiting, pool: Sequence[ExecutorState], now: float
    ) -> ServiceError:
        measured = [rates for executor in pool if (rates := executor.drain.rates(now)) is not None]
        delay = RETRY_DELAY
        metadata = {
            "choices": str(wanted.choices),
            "tokens": str(wanted.tokens),
            "waiting": str(max(0, would_wait.choices - wanted.choices)),
            "waiting_tokens": str(max(0, would_wait.tokens - wanted.tokens)),
            "max_waiting": "none" if self.max_waiting is None else str(self.max_waiting),
            "max_waiting_tokens": "none" if self.max_waiting_tokens is None else str(self.max_waiting_tokens),
        }
        if measured:
            choices, tokens = (sum(rates) for rates in zip(*measured, strict=True))
            delay = min(max(excess.choices / choices, excess.tokens / tokens, SHORTEST_WAIT), LONGEST_WAIT)
            metadata |= {"drained_choices_per_second": f"{choices:.3g}", "drained_tokens_per_second": f"{tokens:.3g}"}
        return ServiceError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "QUEUE_FULL",
            f"{metadata['waiting']} choices of {metadata['waiting_tokens']} tokens wait already, {wanted.choices} of "
            f"{wanted.tokens} tokens come with this request, and at most {metadata['max_waiting']} choices of "
            f"{metadata['max_waiting_tokens']} tokens may wait; try again in {delay:.1f} s",
            metadata=metadata,
            retry_delay=delay,
        )


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
