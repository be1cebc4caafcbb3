"""Starts a program that ends when its parent does: python leash.py PARENT_PID PROGRAM ARGUMENT...

A supervisor that is killed outright stops nobody. The kernel then sends its children SIGTERM, on Linux; elsewhere this
only starts the program. Nothing but the standard library is imported: it runs before anything else does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Tie this process to its parent and become the program."""
    parent = int(argv[0])
    with contextlib.suppress(AttributeError, OSError):
        # Kept over the exec below, since that changes no user.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the line above
        sys.exit(1)
    os.execv(argv[1], argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
