"""The hooks of a scheduling policy.

A policy is asked; the batch builder acts. What a policy answers is checked, so it may be unfair but never unsafe:
budget, blocks, preemption, time limits and endings are not its business. Hooks must not block and must not keep views
of sequences that have ended. Subclass BaseScheduler and start the scheduler with `--policy package.module:Class`.

A hook that raises or answers nonsense fails no request: it is logged and counted, and until the step is built every
question goes to first come, first served.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from scheduler_svc.sequence import SequenceStatus, SequenceView

__all__ = ["BaseScheduler", "SequenceStatus", "SequenceView"]


class BaseScheduler(ABC):
    """Decides who goes first, who gives way, and how a step is shared. `now` is in seconds, on a monotonic clock."""

    preempted_first: bool = True
    """Whether a sequence that is preempted for want of blocks goes before all that have not started, whatever its key.

    False: it queues by its key, so a sequence that may be starved by its key can be starved once it has started, too.
    """

    @abstractmethod
    def admission_key(self, view: SequenceView, now: float) -> tuple[float, ...]:
        """The place of a sequence in the queue: a tuple of numbers, smaller goes first, ties in order of arrival.

        Asked once each time a sequence is queued, so let it age by what does not change: arrival plus something is
        overtaken by nobody who comes that much later. Sequences that had started (moved from another executor, or
        preempted, see preempted_first) go before all others whatever their key; among themselves the key orders them.
        One that this policy has evicted for a waiting one queues by its key. Without a valid key a sequence takes its
        turn by arrival.
        """

    def should_shed(self, view: SequenceView, now: float) -> bool:
        """Whether to end a request instead of starting it, with RESOURCE_EXHAUSTED; never asked once it has started.

        Asked for the head of the queue, and for those that may overtake it. Time limits need no answer here: what has
        passed its own, or could not keep it, has ended before.
        """
        return view.deadline is not None and view.deadline <= now

    @abstractmethod
    def choose_victim(self, running: Sequence[SequenceView], wanting: SequenceView, now: float) -> SequenceView | None:
        """Who gives up its blocks (and its row) because `wanting` does not fit. None: nobody; `wanting` must wait.

        `running` is in order of admission. A running `wanting` is in it and may be the answer: it then gives way
        itself. For a waiting `wanting` it holds only sequences that have gained a token since their admission, so
        that no two can evict each other for ever. Asked again, without the earlier answers, until `wanting` would
        fit, for a waiting one at most 16 times; nobody is evicted where the answers do not suffice.
        """

    def may_overtake(self, head: SequenceView, now: float) -> bool:  # noqa: ARG002 - a hook
        """Whether others that fit, in the order of the queue, may go before a head that does not fit now.

        They evict nobody. Say so only for a while: blocks that become free go to them, so the head can starve.
        """
        return False

    def prefill_quota(self, view: SequenceView, budget: int) -> int:  # noqa: ARG002 - a hook
        """How many of the `budget` tokens left in the step a sequence with more than one token to compute may take.

        0 or more; what is more than the budget is cut.
        """
        return budget

    def on_tokens(self, view: SequenceView, prompt: int, output: int) -> None:  # noqa: B027 - a hook, not an omission
        """Told of finished work: prompt tokens computed for the first time, and output tokens."""
