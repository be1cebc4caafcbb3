"""Shorter prompts first, by classes of length and by deadlines."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_svc.length_class import length_class
from scheduler_svc.policies.base import BaseScheduler, SequenceStatus, SequenceView

ALLOWANCES = (1.0, 4.0, 16.0, 64.0)
"""Seconds from its arrival within which a request of each length class should have its turn."""


class ShortestFirstScheduler(BaseScheduler):
    """Earliest due first. A request is due when its class's allowance is over, or at its own first time limit.

    A shorter class is due sooner, so it goes first; within a class the nearest time limit decides, then arrival. A
    long one is overtaken by shorter ones that come within the difference of the allowances and by nobody later: none
    starves. While the head is not due, whoever fits beside it may go before it, so the batch is filled; from then on
    it has the next free blocks.
    """

    preempted_first = False

    def admission_key(self, view: SequenceView, now: float) -> tuple[float, ...]:  # noqa: ARG002 - a hook
        """When it is due; that never changes while it waits."""
        return (_due(view),)

    def choose_victim(
        self,
        running: Sequence[SequenceView],
        wanting: SequenceView,
        now: float,  # noqa: ARG002 - a hook
    ) -> SequenceView | None:
        """The one that is due last, be it `wanting` itself; nobody for one that waits."""
        if wanting.status is SequenceStatus.WAITING:
            return None
        # The last of equals: it was admitted last.
        return max(reversed(running), key=_due)

    def may_overtake(self, head: SequenceView, now: float) -> bool:
        """Until the head is due."""
        return now < _due(head)


def _due(view: SequenceView) -> float:
    allowed = view.arrival + ALLOWANCES[length_class(view.num_prompt_tokens)]
    limits = (view.queue_deadline, view.first_token_deadline, view.deadline)
    return min((limit for limit in limits if limit is not None and limit < allowed), default=allowed)
