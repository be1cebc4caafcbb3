"""A queue where whoever comes now has to wait, and what is said to those for whom there is no place in it.

The scheduler decides by it, and so does a gateway that was told of it: one rule, one wording.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import grpc

from octavo.rpc.errors import ServiceError

QUEUE_FULL = "QUEUE_FULL"
LONGEST_WAIT = 60.0
"""The longest wait that is told, in seconds: what holds in a minute, nobody knows."""
SHORTEST_WAIT = 0.1
"""The shortest wait that is told, in seconds: below it clients would only knock."""
UNKNOWN_WAIT = 1.0
"""The wait that is told, in seconds, where nothing has been measured."""


@dataclass(frozen=True)
class FullQueue:
    """The choices that wait, and their tokens; how many may, None for any number; how fast they leave, where measured.

    `num_choices` is below zero where rows are free: so many may come and not wait. Two are equal where as much waits:
    rates change all the time.
    """

    num_choices: int
    num_tokens: int
    max_choices: int | None
    max_tokens: int | None
    drained: tuple[float, float] | None = field(default=None, compare=False)
    """Choices, and tokens, that leave in a second."""
    is_idle: bool = False
    """Whoever comes next is taken, however much it is: an executor has nothing to do."""

    def fits(self, num_choices: int, num_tokens: int) -> bool:
        """Whether a request of so many choices, each of so many tokens, may wait too."""
        return self.is_idle or not any(self._excess(num_choices, num_tokens))

    @property
    def is_half_empty(self) -> bool:
        """Whether at most half of what may wait does."""
        choices = self.max_choices is None or 2 * self.num_choices <= self.max_choices
        return choices and (self.max_tokens is None or 2 * self.num_tokens <= self.max_tokens)

    def plus(self, num_choices: int, num_tokens: int) -> FullQueue:
        """Return the queue with so many choices more, of so many tokens together; what does not fit is never in it."""
        if not num_choices:
            return self
        choices, tokens = self.num_choices + num_choices, self.num_tokens + num_tokens
        if self.max_choices is not None:
            choices = min(choices, max(self.num_choices, self.max_choices))
        if self.max_tokens is not None:
            tokens = min(tokens, max(self.num_tokens, self.max_tokens))
        return replace(self, num_choices=choices, num_tokens=tokens, is_idle=False)

    def refusal(self, num_choices: int, num_tokens: int) -> ServiceError:
        """Return RESOURCE_EXHAUSTED with the numbers and a delay, for a request that does not fit."""
        excess_choices, excess_tokens = self._excess(num_choices, num_tokens)
        metadata = {
            "choices": str(num_choices),
            "tokens": str(num_choices * num_tokens),
            "waiting": str(max(0, self.num_choices)),
            "waiting_tokens": str(max(0, self.num_tokens)),
            "max_waiting": "none" if self.max_choices is None else str(self.max_choices),
            "max_waiting_tokens": "none" if self.max_tokens is None else str(self.max_tokens),
        }
        delay = UNKNOWN_WAIT
        if self.drained is not None:
            choices, tokens = self.drained
            delay = min(max(excess_choices / choices, excess_tokens / tokens, SHORTEST_WAIT), LONGEST_WAIT)
            metadata |= {"drained_choices_per_second": f"{choices:.3g}", "drained_tokens_per_second": f"{tokens:.3g}"}
        return ServiceError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            QUEUE_FULL,
            f"{metadata['waiting']} choices of {metadata['waiting_tokens']} tokens wait already, {num_choices} of "
            f"{metadata['tokens']} tokens come with this request, and at most {metadata['max_waiting']} choices of "
            f"{metadata['max_waiting_tokens']} tokens may wait; try again in {delay:.1f} s",
            metadata=metadata,
            retry_delay=delay,
        )

    def _excess(self, num_choices: int, num_tokens: int) -> tuple[int, int]:
        """How many choices and tokens too many would wait."""
        choices = 0 if self.max_choices is None else self.num_choices + num_choices - self.max_choices
        tokens = 0 if self.max_tokens is None else self.num_tokens + num_choices * num_tokens - self.max_tokens
        return max(0, choices), max(0, tokens)
