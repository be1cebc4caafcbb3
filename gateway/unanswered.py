"""What this gateway has submitted and the scheduler has not answered yet: no report on queues counts it."""

from __future__ import annotations

from typing import NamedTuple


class _Submitted(NamedTuple):
    model: str
    num_choices: int
    num_tokens: int


class Unanswered:
    """Choices that were submitted, and their tokens, by model. Everything costs the same however many there are."""

    def __init__(self) -> None:
        self._submitted: dict[int, _Submitted] = {}
        self._sums: dict[str, tuple[int, int]] = {}

    def add(self, counter: int, model: str, num_choices: int, num_tokens: int) -> None:
        """Count a request. `num_tokens`: of all its choices. One that is submitted again counts once."""
        self.remove(counter)
        self._submitted[counter] = _Submitted(model, num_choices, num_tokens)
        choices, tokens = self.count(model)
        self._sums[model] = choices + num_choices, tokens + num_tokens

    def remove(self, counter: int) -> None:
        """Count a request no more. Idempotent."""
        submitted = self._submitted.pop(counter, None)
        if submitted is not None:
            choices, tokens = self._sums[submitted.model]
            self._sums[submitted.model] = choices - submitted.num_choices, tokens - submitted.num_tokens

    def count(self, model: str) -> tuple[int, int]:
        """Return how many choices of a model there are, and how many tokens they have together."""
        return self._sums.get(model, (0, 0))
