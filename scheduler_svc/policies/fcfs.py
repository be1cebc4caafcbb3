"""First come, first served."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_svc.policies.base import BaseScheduler, SequenceStatus, SequenceView


class FcfsScheduler(BaseScheduler):
    """Oldest request first; the youngest gives way. No request is overtaken, so none starves."""

    def admission_key(self, view: SequenceView, now: float) -> tuple[float, ...]:  # noqa: ARG002 - a hook
        """The time of arrival, which survives preemption and the loss of an executor."""
        return (view.arrival,)

    def choose_victim(
        self,
        running: Sequence[SequenceView],
        wanting: SequenceView,
        now: float,  # noqa: ARG002 - a hook
    ) -> SequenceView | None:
        """The youngest that runs, be it `wanting` itself; nobody for one that waits."""
        if wanting.status is SequenceStatus.WAITING:
            return None
        # The last of equals: it was admitted last.
        return max(reversed(running), key=lambda view: view.arrival)
