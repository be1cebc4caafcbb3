"""What a kernel's launch must know of the GPU it is made for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """Figures of one GPU."""

    name: str
    processors: int
    """Multiprocessors (compute units): programs that run side by side, at least."""
    shared_bytes: int
    """Most shared memory of one program."""


@dataclass(frozen=True)
class Budget:
    """What a kernel may take of a multiprocessor, so that enough of its programs run side by side.

    Held for every compiled form of the kernel; what a form takes is read from its binary.
    """

    registers: int
    """Of a thread."""
    shared_bytes: int = 0
    """Of a program."""
    spilled_bytes: int = 0
    """Of a thread: registers that did not fit, and went to memory."""
