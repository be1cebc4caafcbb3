"""Higher priority first."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_svc.policies.base import BaseScheduler, SequenceStatus, SequenceView

AGING = 10.0
"""Seconds of waiting that one level of priority is worth."""

MAX_EVICTIONS = 3
"""Preemptions after which a sequence is evicted for waiting ones no more."""


class PriorityScheduler(BaseScheduler):
    """A request of priority p goes first as if it had come AGING * p seconds earlier.

    All age alike, so the order of two requests never changes while they wait, and nothing is ever ordered anew. One
    that has waited AGING seconds longer per level of difference is overtaken no more: none starves.

    A waiting request evicts running ones of lower priority that it also precedes by age. Both orders are strict, so no
    two can evict each other, and each is evicted MAX_EVICTIONS times at most.
    """

    # Else a preempted sequence that waits for blocks would hold up every request of higher priority.
    preempted_first = False

    def admission_key(self, view: SequenceView, now: float) -> tuple[float, ...]:  # noqa: ARG002 - a hook
        """When it would have come, were it of priority 0."""
        return (_order(view),)

    def choose_victim(
        self,
        running: Sequence[SequenceView],
        wanting: SequenceView,
        now: float,  # noqa: ARG002 - a hook
    ) -> SequenceView | None:
        """The last in order that runs, be it `wanting` itself; for one that waits, of those it may evict."""
        if wanting.status is not SequenceStatus.WAITING:
            # The last of equals: it was admitted last.
            return max(reversed(running), key=_order)
        priority, last_order, last = wanting.priority, _order(wanting), None
        for view in running:
            if view.priority < priority and view.num_preemptions < MAX_EVICTIONS:
                order = _order(view)
                if order > last_order or (order == last_order and last is not None):
                    last_order, last = order, view
        return last


def _order(view: SequenceView) -> float:
    return view.arrival - AGING * view.priority
