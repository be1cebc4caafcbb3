"""What this gateway has let through to a full queue and no report on that queue counts yet."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple


class _Let(NamedTuple):
    model: str
    num_choices: int
    num_tokens: int


class Unanswered:
    """Choices that were let through, and their tokens, by model. Everything costs the same however many there are.

    Counted from the moment a request gets past the front, while its prompt is made into tokens, to the first report
    behind the scheduler's answer. Answers come before the report that counts them, so between the two a place would be
    given twice.
    """

    def __init__(self) -> None:
        self._let: dict[Hashable, _Let] = {}
        self._accepted: list[Hashable] = []
        self._sums: dict[str, tuple[int, int]] = {}

    def add(self, key: Hashable, model: str, num_choices: int, num_tokens: int) -> None:
        """Count a request. `num_tokens`: of all its choices. One that is added again counts once."""
        self.remove(key)
        self._let[key] = _Let(model, num_choices, num_tokens)
        choices, tokens = self.count(model)
        self._sums[model] = choices + num_choices, tokens + num_tokens

    def remove(self, key: Hashable) -> None:
        """Count a request no more. Idempotent."""
        let = self._let.pop(key, None)
        if let is not None:
            choices, tokens = self._sums[let.model]
            self._sums[let.model] = choices - let.num_choices, tokens - let.num_tokens

    def accept(self, key: Hashable) -> None:
        """Count a request until the next report only: the scheduler has taken it, and tells of it from then on."""
        if key in self._let:
            self._accepted.append(key)

    def report(self) -> None:
        """Count no more what was accepted: a report on the queues has come that does."""
        for key in self._accepted:
            self.remove(key)
        self._accepted.clear()

    def count(self, model: str) -> tuple[int, int]:
        """Return how many choices of a model there are, and how many tokens they have together."""
        return self._sums.get(model, (0, 0))
