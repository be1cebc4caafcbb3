"""Length classes: the one place that says how long a long prompt is."""

from __future__ import annotations

from bisect import bisect_left

CLASS_BOUNDS = (256, 1024, 4096)
"""Longest prompt, in tokens, of each length class but the last, which has no bound."""

NUM_CLASSES = len(CLASS_BOUNDS) + 1

SHORT = 0
"""The class that the burst reserve is kept for. Its prompts fit one step of the default budget with room to spare."""


def length_class(num_prompt_tokens: int) -> int:
    """The length class of a prompt, 0 for the shortest.

    A class is four times as wide as the one below: within one, who goes first matters less than between two.
    """
    return bisect_left(CLASS_BOUNDS, num_prompt_tokens)
