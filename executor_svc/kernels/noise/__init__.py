"""Contract of the noise of sampling: Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011, "Parallel Random Numbers: As
Easy as 1, 2, 3").

A counter-based generator has no state: the noise of a token is a function of its place alone, so a replayed,
preempted or differently batched sequence draws the same. The place is

    key     = (seed & 0xffffffff, seed >> 32)
    counter = (choice, position, lane, 0)

where position is the index that the drawn token will have in the whole sequence, prompt and output together, and lane
numbers the independent draws for one token. Lane 0 picks the token. A uniform number takes 53 bits of the block: all
of word 0 above the high 21 bits of word 1. Every kernel set draws by this rule.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

TOKEN_LANE = 0
"""The lane that picks the token."""


class Uniform(Protocol):
    """Numbers by place."""

    def __call__(self, seeds: Tensor, choices: Tensor, positions: Tensor, lane: int = TOKEN_LANE) -> Tensor:
        """Return float64 [N], uniform in [0, 1): one number a row, on the device of the arguments.

        seeds is uint64 [N], choices and positions are int64 [N], each in [0, 2^32).
        """
