"""Stands between the batch builder and a policy: nothing that a policy does reaches further than its own answer.

That holds for BaseException, too. A hook is a plain call, so a CancelledError out of it is of its own making, and one
that went on up would be taken for the end of whatever call or task had asked.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from scheduler_svc.policies.base import BaseScheduler, SequenceView
from scheduler_svc.policies.fcfs import FcfsScheduler

logger = logging.getLogger(__name__)

HOOKS = ("admission_key", "should_shed", "choose_victim", "may_overtake", "prefill_quota", "on_tokens")
"""What a policy is asked and told, and can fail in."""

LOG_INTERVAL = 10.0
"""Least seconds between two lines about the same hook: a broken hook fails thousands of times a second."""


class PolicyGuard:
    """Asks a policy. Where it raises or answers nonsense, that is counted and logged.

    From a failure until the next `begin_step` first come, first served answers in its place: a policy that is wrong
    about one thing is not asked about the next while a step is half built.
    """

    def __init__(self, policy: BaseScheduler) -> None:
        self._policy = policy
        self._fallback = FcfsScheduler()
        self._asked = policy
        self._now = 0.0
        self._logged_at: dict[str, float] = {}
        self.num_failures = dict.fromkeys(HOOKS, 0)
        self.preempted_first = policy.preempted_first is not False
        is_told = getattr(policy.on_tokens, "__func__", None) is not BaseScheduler.on_tokens
        # None where the policy does not listen: it would be called for every token.
        self.on_tokens: Callable[[SequenceView, int, int], None] | None = self._tell if is_told else None

    def begin_step(self, now: float) -> None:
        """Ask the policy again, whatever went wrong before. `now` is that of the questions to come."""
        self._now = now
        self._asked = self._policy

    def fall_back(self) -> None:
        """Have first come, first served answer until the next begin_step: the policy's answers lead nowhere."""
        self._asked = self._fallback

    def admission_key(self, view: SequenceView, now: float) -> tuple[float, ...] | None:
        """The policy's key, of plain numbers, or None where it gave none that can be compared.

        Asked between steps too, so the policy is asked whatever else went wrong.
        """
        self._now = now
        try:
            key = self._policy.admission_key(view, now)
            if isinstance(key, tuple):
                # Numbers of other types could raise when they are compared.
                plain = tuple(int(part) if isinstance(part, int) else float(part) for part in key)
                if all(isinstance(part, (int, float)) for part in key) and not any(map(_is_nan, plain)):
                    return plain
        except BaseException as error:
            self._failed("admission_key", error)
        else:
            self._failed("admission_key", _nonsense(key))
        return None

    def should_shed(self, view: SequenceView, now: float) -> bool:
        """Whether to end a request instead of starting it."""
        try:
            answer = self._asked.should_shed(view, now)
            if answer is True or answer is False:
                return answer
        except BaseException as error:
            self._failed("should_shed", error)
        else:
            self._failed("should_shed", _nonsense(answer))
        return self._fallback.should_shed(view, now)

    def choose_victim(self, running: Sequence[SequenceView], wanting: SequenceView, now: float) -> SequenceView | None:
        """One of `running`, or nobody."""
        try:
            answer = self._asked.choose_victim(running, wanting, now)
            if answer is None or any(answer is view for view in running):
                return answer
        except BaseException as error:
            self._failed("choose_victim", error)
        else:
            self._failed("choose_victim", _nonsense(answer))
        return self._fallback.choose_victim(running, wanting, now)

    def may_overtake(self, head: SequenceView, now: float) -> bool:
        """Whether others may go before a head that does not fit."""
        try:
            answer = self._asked.may_overtake(head, now)
            if answer is True or answer is False:
                return answer
        except BaseException as error:
            self._failed("may_overtake", error)
        else:
            self._failed("may_overtake", _nonsense(answer))
        return self._fallback.may_overtake(head, now)

    def prefill_quota(self, view: SequenceView, budget: int) -> int:
        """Tokens that a sequence may take: 0 to budget."""
        try:
            answer = self._asked.prefill_quota(view, budget)
            if isinstance(answer, int) and not isinstance(answer, bool) and answer >= 0:
                return min(int(answer), budget)
        except BaseException as error:
            self._failed("prefill_quota", error)
        else:
            self._failed("prefill_quota", _nonsense(answer))
        return self._fallback.prefill_quota(view, budget)

    def _tell(self, view: SequenceView, prompt: int, output: int) -> None:
        try:
            self._policy.on_tokens(view, prompt, output)
        except BaseException as error:
            self._failed("on_tokens", error)

    def _failed(self, hook: str, error: BaseException) -> None:
        self.num_failures[hook] += 1
        self._asked = self._fallback
        logged_at = self._logged_at.get(hook)
        if logged_at is not None and self._now - logged_at < LOG_INTERVAL:
            return
        self._logged_at[hook] = self._now
        fields = {
            "policy": type(self._policy).__qualname__,
            "hook": hook,
            "error": words_of(error),
            "failures": self.num_failures[hook],
        }
        message = "the policy failed; first come, first served in its place"
        # Nonsense has no stack to show.
        exc_info = error if error.__traceback__ is not None else None
        logger.error(message, exc_info=exc_info, extra={"fields": fields})


def words_of(error: BaseException) -> str:
    """Return the message of an error of a user's code, which can fail to tell it."""
    try:
        return str(error)
    except BaseException:
        return f"{type(error).__name__}, which cannot say more"


def _is_nan(number: float) -> bool:
    # A large int has no float.
    return isinstance(number, float) and math.isnan(number)


def _nonsense(answer: object) -> ValueError:
    return ValueError(f"answered a {type(answer).__name__} that makes no sense here")
