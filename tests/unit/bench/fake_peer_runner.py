"""Stands for a peer's runner: echoes prompts at once, over the real protocol. Modes are ways to fail."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "bench" / "peers"))

import protocol


class Echo(protocol.Engine):
    """Gives back what it got; some modes do something else."""

    def __init__(self, mode: str) -> None:
        print("what a library prints on the standard output")
        if mode == "unfit":
            raise RuntimeError("this CPU has no such instruction")
        self.label, self.versions = "echo", "echo 1"
        self._mode = mode

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        """See Engine."""
        if self._mode == "dies":
            os._exit(7)
        cut = 1 if self._mode == "short" else 0
        return [(prompt * length)[: length - cut] for prompt, length in zip(prompts, lengths, strict=True)]


protocol.main(lambda args: Echo(args.mode), "fine", "unfit", "dies", "short")
