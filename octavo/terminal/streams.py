"""The standard streams as commands want them, whatever the shell gave."""

from __future__ import annotations

import io
import os
import sys


def prepare_streams() -> None:
    """Make every standard stream usable. Call it before anything opens a file.

    A stream that the shell closed becomes the null device: Python would have None there, and the next socket its file
    descriptor. What cannot be written in the stream's encoding becomes question marks; input that cannot be decoded is
    refused by those who take it, with the name of what it was meant for.
    """
    # In the order of their descriptors, since the system gives the lowest free one.
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115, PTH123 - for the life of the process
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "replace")):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors=errors)


def drop_output() -> None:
    """Send what is still to be written to the null device: Python flushes once more at its end, and would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
