"""The word that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word most like `word`; None where none is."""
    found = difflib.get_close_matches(word, sorted(known), n=1)
    return found[0] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" to end a message with; empty where no known word is like it."""
    found = closest(word, known)
    return "" if found is None else f"; did you mean {found}?"
