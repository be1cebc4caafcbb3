"""A policy that answers anything."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from scheduler_svc.policies.base import BaseScheduler, SequenceView


class WhimsicalScheduler(BaseScheduler):
    """Answers at random, nonsense included: a policy may be unfair, never unsafe."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._seen: list[SequenceView] = []

    def admission_key(self, view: SequenceView, now: float) -> tuple[float, ...]:
        self._seen.append(view)
        answers: list[Any] = [(self._random.random(),), (1.0, 2), (float("nan"),), (), "first", None, (float("-inf"),)]
        answer: tuple[float, ...] = self._random.choice(answers)
        return answer

    def choose_victim(self, running: Sequence[SequenceView], wanting: SequenceView, now: float) -> SequenceView | None:
        answers: list[Any] = [*running, *running, wanting, None, self._random.choice(self._seen), "nobody"]
        answer: SequenceView | None = self._random.choice(answers)
        return answer

    def prefill_quota(self, view: SequenceView, budget: int) -> int:
        answers: list[Any] = [0, -3, 1, budget, budget, 10**9, None, 0.5]
        answer: int = self._random.choice(answers)
        return answer
