"""Stop strings in text that comes bit by bit.

What is found does not depend on how the text is cut: the first character that completes a stop string ends the text,
and where it completes several, the longest of them, which begins first, is the one. Nothing is held back but the end of
the text where a stop string may have begun; where the stop string is to be shown too, nothing at all.
"""

from __future__ import annotations

from collections.abc import Sequence


class _Stop:
    """A stop string, ready for the search of Knuth, Morris and Pratt.

    `borders[k]`: of its first k characters, how many are both a beginning and an end, short of all k.
    """

    __slots__ = ("borders", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.borders = [0, 0]
        border = 0
        for character in text[1:]:
            while border and text[border] != character:
                border = self.borders[border]
            if text[border] == character:
                border += 1
            self.borders.append(border)

    def search(self, text: str, matched: int, can_stop: bool) -> tuple[int, int | None]:
        """Go on over `text` where `matched` characters of the stop string are the end of what came before.

        Returns how many are at the end of it, and behind which of its characters the stop string was first complete;
        None: nowhere, or it may not be.
        """
        stop, borders, length = self.text, self.borders, len(self.text)
        if not matched and stop[0] not in text:
            return 0, None
        for index, character in enumerate(text):
            while matched and stop[matched] != character:
                matched = borders[matched]
            if stop[matched] == character:
                matched += 1
                if matched == length:
                    if can_stop:
                        return matched, index + 1
                    matched = borders[matched]
        return matched, None


class StopStrings:
    """The stop strings of a request, made ready once for all its choices. Immutable."""

    def __init__(self, texts: Sequence[str]) -> None:
        """`texts`: distinct, none empty."""
        self.stops = tuple(_Stop(text) for text in texts)


class StopMatcher:
    """The text of one choice on its way to the client, ended by the first stop string in it."""

    def __init__(self, strings: StopStrings, *, include_stop: bool) -> None:
        """`include_stop`: the stop string that is found is part of the text."""
        self._stops = strings.stops
        self._matched = [0] * len(strings.stops)
        self._include_stop = include_stop
        self._held = ""
        self.found: str | None = None
        """The stop string that has ended the text."""

    def push(self, text: str, *, can_stop: bool = True) -> str:
        """Return what can be shown now that `text` has come; behind a stop string nothing is.

        `can_stop` False: a stop string that `text` completes is text like any other.
        """
        if not text or self.found is not None:
            return ""
        best: tuple[int, int] | None = None
        for number, stop in enumerate(self._stops):
            self._matched[number], end = stop.search(text, self._matched[number], can_stop)
            if end is not None and (best is None or (end, -len(stop.text)) < best):
                best = (end, -len(stop.text))
                self.found = stop.text
        text = self._held + text
        if best is not None and self.found is not None:
            shown = len(self._held) + best[0] - (0 if self._include_stop else len(self.found))
            self._held = ""
            return text[:shown]
        held = 0 if self._include_stop else max(self._matched, default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """Return what was held back, at the end of the output. What comes behind it is a text of its own."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held
