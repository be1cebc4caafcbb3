"""Colours where a person looks, none where a program reads."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Mapping
from typing import TextIO

_RESET = "\x1b[0m"
_KEPT_CONTROLS = "\n\t"


class Style:
    """Marks text for one stream: escape sequences on a terminal, nothing elsewhere.

    NO_COLOR set to anything turns colours off (no-color.org), and so does a terminal that calls itself dumb.
    """

    def __init__(self, stream: TextIO, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self.is_terminal = stream.isatty()
        """Whether a person looks at the stream."""
        self._is_on = self.is_terminal and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"

    def bold(self, text: str) -> str:
        """Return the text, stronger."""
        return self._mark("1", text)

    def dim(self, text: str) -> str:
        """Return the text, weaker: what is said on the side."""
        return self._mark("2", text)

    def red(self, text: str) -> str:
        """Return the text in red: what went wrong."""
        return self._mark("31", text)

    def green(self, text: str) -> str:
        """Return the text in green: what is well."""
        return self._mark("32", text)

    def yellow(self, text: str) -> str:
        """Return the text in yellow: what may matter."""
        return self._mark("33", text)

    def _mark(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}{_RESET}" if self._is_on and text else text


def printable(text: str) -> str:
    """Return the text without what steers a terminal: a model or a client could write such characters.

    Line ends and tabs stay; other control and format characters become U+FFFD, but for the joiners that scripts and
    emoji are made with.
    """
    if text.isprintable():
        return text
    return "".join(char if _is_harmless(char) else "\ufffd" for char in text)


def _is_harmless(char: str) -> bool:
    if char in _KEPT_CONTROLS or char in "\u200c\u200d":
        return True
    return unicodedata.category(char) not in ("Cc", "Cf", "Cs")
