"""The word that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MARKS = ("--", "OCTAVO_")
"""What all flags and all variables begin with, so that it is no likeness."""
_LIKE = 0.7
"""Below this share of common characters a word is another one, and naming it would mislead."""


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the first known word that begins with `word`, else the one most like it; None where there is neither."""
    wanted = _bare(word)
    bare = {_bare(each): each for each in sorted(known, reverse=True)}
    longer = [each for each in sorted(bare) if len(wanted) > 1 and each.startswith(wanted)]
    like = difflib.get_close_matches(wanted, sorted(bare), n=1, cutoff=_LIKE)
    return next((bare[each] for each in longer + like), None)


def _bare(word: str) -> str:
    for mark in _MARKS:
        word = word.removeprefix(mark)
    return word


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" to end a message with; empty where no known word is like it."""
    found = closest(word, known)
    return "" if found is None else f"; did you mean {found}?"
