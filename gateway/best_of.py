"""The likeliest of several choices, as if they had been the only ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean

from gateway.live_request import ChoiceRecord
from gateway.requests import ChoiceFinished, Delta, Event


def likeliest(choices: Sequence[ChoiceRecord], count: int) -> list[int]:
    """Return the indices of the `count` choices with the highest mean logprob of their tokens, likeliest first.

    Equals stand in their own order. Every choice has logprobs; one without tokens counts as certain.
    """
    means = [_mean_logprob(choice) for choice in choices]
    return sorted(range(len(choices)), key=lambda index: (-means[index], index))[:count]


def renumbered(events: Iterable[Event], chosen: Sequence[int]) -> list[Event]:
    """Return the events of the chosen choices, choice by choice under the numbers of their ranks."""
    by_choice: dict[int, list[Event]] = {index: [] for index in chosen}
    for event in events:
        if isinstance(event, Delta | ChoiceFinished) and event.choice in by_choice:
            by_choice[event.choice].append(replace(event, choice=chosen.index(event.choice)))
    return [event for index in chosen for event in by_choice[index]]


def _mean_logprob(choice: ChoiceRecord) -> float:
    assert choice.logprobs is not None, "they are asked for wherever choices are ranked"
    return fmean(choice.logprobs.sampled()) if len(choice.logprobs) else 0.0
