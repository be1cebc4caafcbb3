"""Lines that a person types, with editing and a history that lasts; or lines from a pipe."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any, Protocol, TextIO

_KEPT_LINES = 1000


class LineInput(Protocol):
    """Where the questions come from."""

    is_interactive: bool
    """Whether a person types them."""

    def read(self) -> str:
        """Return the next line without its end. Raises EOFError at the end, KeyboardInterrupt at Ctrl-C."""


class PipedLines:
    """Lines of a file or a pipe."""

    is_interactive = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def read(self) -> str:
        """Return the next line. Raises EOFError."""
        line = self._stream.readline()
        if not line:
            raise EOFError
        return line.rstrip("\r\n")


class TypedLines:
    """Lines from the terminal, by readline where this Python has it. Each line is added to `history` at once."""

    is_interactive = True

    def __init__(self, prompt: str, history: Path) -> None:
        """`history`: a file, made where it is missing; where it cannot be, the history is forgotten at the end."""
        self._prompt = prompt
        self._history = history
        self._readline = _readline()
        if self._readline is not None:
            self._readline.set_history_length(_KEPT_LINES)
            with contextlib.suppress(OSError):
                history.parent.mkdir(parents=True, exist_ok=True)
                # What people ask a model is nobody else's business.
                history.touch(mode=0o600)
                self._readline.read_history_file(history)

    def read(self) -> str:
        """Return the next line. Raises EOFError at Ctrl-D, KeyboardInterrupt at Ctrl-C."""
        if self._readline is None:
            return input(self._prompt)
        before = self._readline.get_current_history_length()
        line = input(self._prompt)
        new = self._readline.get_current_history_length() - before
        # Added and not written anew: another chat may have added its own meanwhile.
        if new > 0 and hasattr(self._readline, "append_history_file"):
            with contextlib.suppress(OSError):
                self._readline.append_history_file(new, self._history)
        return line


def open_lines(prompt: str, history: Path) -> LineInput:
    """Return the lines of standard input: typed where a person sits at both ends, else piped."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return TypedLines(prompt, history)
    return PipedLines(sys.stdin)


def _readline() -> Any:
    """Return the module; None where this Python was built without it."""
    try:
        import readline
    except ImportError:
        return None
    return readline
