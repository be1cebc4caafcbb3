"""The word that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word most like `word`, or else the first that begins with it; None where there is neither."""
    words = sorted(known)
    like = difflib.get_close_matches(word, words, n=1)
    longer = [each for each in words if len(word) > 2 and each.startswith(word)]
    return next(iter(like + longer), None)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" to end a message with; empty where no known word is like it."""
    found = closest(word, known)
    return "" if found is None else f"; did you mean {found}?"
