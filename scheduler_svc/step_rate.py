"""What a step of so many tokens takes, measured: a start and so much for each token."""

from __future__ import annotations

MEMORY_STEPS = 200.0
"""Steps after which a measurement counts a third: rates follow the lengths of the contexts and the load."""

LEAST_SLOPE = 0.25
"""Share of a step's time by token that is taken to grow with the tokens, at the least.

Where all steps have been of about one size no slope can be seen, and one that is called 0 would make every executor as
good as any other.
"""

STEP_TOKENS = 16.0
"""Where nothing is measured a step begins at the cost of so many tokens. Then costs are no seconds; their proportion
alone counts.
"""


Line = tuple[float, float]
"""The start of a step and what each of its tokens adds, in seconds; in tokens where nothing is measured."""


class StepRate:
    """A line through the steps of executors that are alike, by least squares; older ones fade."""

    __slots__ = ("_products", "_seconds", "_squares", "_tokens", "_weight")

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0

    @property
    def is_measured(self) -> bool:
        """Whether it has seen steps that took time."""
        return self._seconds > 0.0

    def answered(self, num_tokens: int, seconds: float) -> None:
        """Take in a step of num_tokens tokens."""
        fade = 1.0 - 1.0 / MEMORY_STEPS
        self._weight = self._weight * fade + 1.0
        self._tokens = self._tokens * fade + num_tokens
        self._seconds = self._seconds * fade + seconds
        self._squares = self._squares * fade + num_tokens * num_tokens
        self._products = self._products * fade + num_tokens * seconds

    def line(self) -> Line:
        """Return what is known of steps by now."""
        if not self.is_measured:
            return STEP_TOKENS, 1.0
        tokens, seconds = self._tokens / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - tokens * tokens
        most = seconds / tokens
        slope = 0.0
        if spread > 1e-6 * tokens * tokens:
            slope = (self._products / self._weight - tokens * seconds) / spread
        slope = min(most, max(LEAST_SLOPE * most, slope))
        return seconds - slope * tokens, slope
