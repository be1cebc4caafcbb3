"""The hooks of a scheduling policy.

A policy is asked; the batch builder acts. What a policy answers is checked, so it may be unfair but never unsafe:
budget, blocks, preemption and endings are not its business. Hooks must not block and must not keep views of sequences
that have ended. Subclass BaseScheduler and start the scheduler with `--policy package.module:Class`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from scheduler_svc.sequence import SequenceStatus, SequenceView

__all__ = ["BaseScheduler", "SequenceStatus", "SequenceView"]


class BaseScheduler(ABC):
    """Decides who goes first, who gives way, and how a step is shared. `now` is in seconds, on a monotonic clock."""

    @abstractmethod
    def admission_key(self, view: SequenceView, now: float) -> tuple[float, ...]:
        """The place of a sequence in the queue: smaller goes first, ties in order of arrival.

        Asked once each time a sequence is queued. Sequences that had started (preempted, or moved from another
        executor) go before all others whatever their key; among themselves the key orders them. NaN goes last.
        """

    def should_shed(self, view: SequenceView, now: float) -> bool:
        """Whether to end a request instead of starting it; asked for the head of the queue, never once it has started.

        Where its deadline has passed it ends with DEADLINE_EXCEEDED, else with RESOURCE_EXHAUSTED.
        """
        return view.deadline is not None and view.deadline <= now

    @abstractmethod
    def choose_victim(self, running: Sequence[SequenceView], wanting: SequenceView, now: float) -> SequenceView | None:
        """Who gives up its blocks (and its row) because `wanting` does not fit. None: nobody; `wanting` must wait.

        `running` is in order of admission. A running `wanting` is in it and may be the answer: it then gives way
        itself. For a waiting `wanting` it holds only sequences that have gained a token since their admission, so
        that no two can evict each other for ever. Asked again, without the earlier answers, until `wanting` would
        fit; nobody is evicted where the answers do not suffice.
        """

    def prefill_quota(self, view: SequenceView, budget: int) -> int:  # noqa: ARG002 - a hook
        """How many of the `budget` tokens left in the step a sequence with more than one token to compute may take."""
        return budget

    def on_tokens(self, view: SequenceView, prompt: int, output: int) -> None:  # noqa: B027 - a hook, not an omission
        """Told of finished work: prompt tokens computed for the first time, and output tokens."""
