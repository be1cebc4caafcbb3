"""Stand-ins for the two ends of a terminal."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence


class Screen(io.StringIO):
    """An output that says it is a terminal; `on_write` sees each text that is written."""

    def __init__(self, *, is_terminal: bool = True, on_write: Callable[[str], None] = lambda text: None) -> None:
        super().__init__()
        self._is_terminal = is_terminal
        self._on_write = on_write

    def isatty(self) -> bool:
        """Say what it is."""
        return self._is_terminal

    def write(self, text: str) -> int:
        """Keep a text, then show it to `on_write`."""
        count = super().write(text)
        self._on_write(text)
        return count


class Typed:
    """What a person types, line by line; an exception in the list is raised in its turn."""

    def __init__(self, lines: Sequence[str | type[BaseException]], *, is_interactive: bool = True) -> None:
        self.is_interactive = is_interactive
        self._lines: Iterator[str | type[BaseException]] = iter(lines)

    def read(self) -> str:
        """Return the next line, EOFError after the last."""
        line = next(self._lines, EOFError)
        if isinstance(line, str):
            return line
        raise line
