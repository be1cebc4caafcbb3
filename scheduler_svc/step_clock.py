"""How long steps take, measured, so that what is to come can be foretold."""

from __future__ import annotations

from collections import deque
from statistics import median_low

from scheduler_svc.batch import StageTimings

NUM_SAMPLES = 15
"""Steps of about one size that are remembered. Their median is not moved by a hiccup."""

MIN_SAMPLES = 3
"""Steps of about one size before anything is foretold from them: the first ones of a process are slow."""

STALE_AFTER = 10.0
"""Seconds after which a measurement counts no more.

Work that is ended because it would be late measures nothing. Were an old measurement believed for ever, one bad moment
could end all such work from then on.
"""


class _SizeClass:
    """Steps between a power of two tokens and the next."""

    __slots__ = ("newest", "representative", "samples")

    def __init__(self) -> None:
        self.samples: deque[tuple[float, int, float]] = deque(maxlen=NUM_SAMPLES)  # seconds per token, tokens, seconds
        self.newest = 0.0
        self.representative: tuple[int, float] | None = None


class StepClock:
    """The step times of one executor session.

    What it foretells is a lower bound of what it has seen: a step takes no less time than a smaller one, and no less
    per token than a larger one. So work that it calls too late is too late unless the machine becomes faster.
    """

    def __init__(self) -> None:
        self._classes: dict[int, _SizeClass] = {}
        self._answered_at = 0.0

    def answered(self, num_tokens: int, sent_at: float, now: float, timings: StageTimings | None) -> float:
        """Take in a step of num_tokens tokens, 0 where it failed, that was sent at `sent_at` and is answered now.

        Returns the seconds that it took. Where the executor does not tell, the time is taken from the answer before,
        behind which the step waited.
        """
        seconds = now - max(sent_at, self._answered_at)
        self._answered_at = now
        if timings is not None:
            seconds = timings.prepare + timings.forward + timings.sample
        if num_tokens < 1:
            return seconds
        size_class = self._classes.setdefault(num_tokens.bit_length(), _SizeClass())
        if now - size_class.newest > STALE_AFTER:
            size_class.samples.clear()
        size_class.newest = now
        size_class.samples.append((seconds / num_tokens, num_tokens, seconds))
        size_class.representative = None
        return seconds

    def seconds(self, num_tokens: int, now: float) -> float:
        """The least that a step of num_tokens tokens takes; 0 where nothing is known."""
        least = 0.0
        for size_class in self._classes.values():
            if len(size_class.samples) < MIN_SAMPLES or now - size_class.newest > STALE_AFTER:
                continue
            if size_class.representative is None:
                size_class.representative = median_low(size_class.samples)[1:]
            size, seconds = size_class.representative
            least = max(least, seconds * min(1.0, num_tokens / size))
        return least

    def seconds_to_compute(self, num_tokens: int, budget: int, num_decoding: int, now: float) -> float:
        """The least time to compute a prompt of num_tokens tokens in steps of `budget` tokens.

        The num_decoding sequences that decode now take one token each of the first step, and of no other: who runs may
        end with any step, and what was foretold from them would be no lower bound any more.
        """
        num_first_tokens = min(num_tokens, max(1, budget - num_decoding))
        seconds = self.seconds(min(budget, num_first_tokens + num_decoding), now)
        num_full_steps, rest = divmod(num_tokens - num_first_tokens, budget)
        seconds += num_full_steps * self.seconds(budget, now) if num_full_steps else 0.0
        return seconds + (self.seconds(rest, now) if rest else 0.0)
