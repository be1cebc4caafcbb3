"""How fast a queue gets shorter, measured: what a client that is refused is told to wait."""

from __future__ import annotations

import math

MEMORY_SECONDS = 30.0
"""What is measured fades with this time constant, so a rate follows the load within a minute."""


class DrainRate:
    """Choices, and tokens, that leave one queue in a second in which somebody waits.

    Time counts only while somebody waits: an empty queue drains at no rate. Whoever leaves an empty queue right away
    has not waited, and does not count either.
    """

    def __init__(self) -> None:
        self._waiting_since: float | None = None
        self._num_left = self._num_left_tokens = 0
        self._choices = self._tokens = self._seconds = 0.0

    @property
    def has_left_over(self) -> bool:
        """Whether the last step left somebody waiting."""
        return self._waiting_since is not None

    def left(self, num_tokens: int) -> None:
        """Note a choice of num_tokens tokens that has left the queue."""
        self._num_left += 1
        self._num_left_tokens += num_tokens

    def step(self, now: float, *, is_waiting: bool) -> None:
        """Note that a step was built, and whether it left somebody waiting."""
        if self._waiting_since is not None:
            seconds = max(0.0, now - self._waiting_since)
            faded = math.exp(-seconds / MEMORY_SECONDS)
            self._seconds = self._seconds * faded + seconds
            self._choices = self._choices * faded + self._num_left
            self._tokens = self._tokens * faded + self._num_left_tokens
        self._num_left = self._num_left_tokens = 0
        self._waiting_since = now if is_waiting else None

    def rates(self, now: float) -> tuple[float, float] | None:
        """Choices and tokens a second; None where nothing has been measured.

        Where nobody has left, somebody may be about to: the rate is that of one by now, less the longer it takes.
        """
        seconds = self._seconds + (0.0 if self._waiting_since is None else max(0.0, now - self._waiting_since))
        if not seconds:
            return None
        choices, tokens = self._choices + self._num_left, self._tokens + self._num_left_tokens
        if choices < 1.0:
            choices, tokens = 1.0, tokens / choices if choices else 0.0
        return choices / seconds, max(1.0, tokens) / seconds
