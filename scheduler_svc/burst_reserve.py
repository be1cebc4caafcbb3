"""The burst reserve: room on an executor that short newcomers have to themselves.

A flood of long prompts takes every block, every row and every token of the budget, and a short prompt that comes then
waits for all of them. The reserve keeps a share of the three out of the flood's reach. It binds admissions and the
shares of a step, nothing else: who runs is never evicted for it, and grows into it where there is nothing else.

Short newcomers use it past the queue, in a lane of their own: in the queue's order among themselves, and never more of
them at once than the reserve holds. So whoever they overtake loses at most the reserve, and gets the rest in its turn.
What does not fit beside the reserve at all is not overtaken once it is the head of the queue; it may then take the
reserve too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scheduler_svc.length_class import CLASS_BOUNDS, SHORT
from scheduler_svc.sequence import Sequence
from scheduler_svc.waiting_queue import QueueKey, WaitingQueue

IDLE_SECONDS = 60.0
"""Without a short newcomer for so long, blocks and rows of the reserve are everybody's again."""


@dataclass(frozen=True)
class ReserveSettings:
    """How much is kept, for whom.

    share: of blocks, rows and token budget, 0 to below 1; 0 keeps nothing. longest_prompt: in tokens, of those it is
    kept for. idle_seconds: how long it is kept once no more of them come.
    """

    share: float = 0.0
    longest_prompt: int = CLASS_BOUNDS[SHORT]
    idle_seconds: float = IDLE_SECONDS


class BurstReserve:
    """The reserve of one executor session, and the short sequences placed there."""

    def __init__(self, settings: ReserveSettings, num_total_blocks: int, max_running: int, budget: int) -> None:
        """num_total_blocks leaves out the null block; budget is in tokens a step."""
        share = settings.share
        # Somebody else must always be able to run, so there is no reserve where only one can.
        self.is_on = 0 < share < 1 and min(num_total_blocks, max_running) > 1
        self.num_blocks = min(math.ceil(share * num_total_blocks), num_total_blocks - 1) if self.is_on else 0
        self.num_rows = min(math.ceil(share * max_running), max_running - 1) if self.is_on else 0
        self.num_tokens = math.ceil(share * budget) if self.is_on else 0
        self.waiting = WaitingQueue()
        self.running: dict[Sequence, None] = {}
        self._settings = settings
        self._num_total_blocks = num_total_blocks
        self._newest_arrival = -math.inf

    # What the executor's state tells.

    def enqueue(self, sequence: Sequence, blocks: int, key: QueueKey) -> None:
        """Note a sequence that is queued and needs so many blocks; it gets into the lane if it is short and fits."""
        if not self.is_on or sequence.num_prompt_tokens > self._settings.longest_prompt:
            return
        if blocks + 1 <= self.num_blocks:
            self.waiting.push(sequence, key)
        self._newest_arrival = max(self._newest_arrival, sequence.request.arrival)

    def dequeue(self, sequence: Sequence) -> None:
        """Note a sequence that waits no more and does not run."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)

    def begin_stay(self, sequence: Sequence) -> None:
        """Note a sequence that is being admitted, by the lane or by the queue."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            self.running[sequence] = None

    def end_stay(self, sequence: Sequence) -> None:
        """Note a sequence that runs no more."""
        self.running.pop(sequence, None)

    # What the batch builder asks.

    def is_kept(self, now: float) -> bool:
        """Whether short newcomers come, so that the reserve is kept for them."""
        return self.is_on and (bool(self.waiting) or now - self._newest_arrival < self._settings.idle_seconds)

    def num_held_blocks(self, now: float) -> int:
        """Blocks that others have to leave: what the short ones do not own of the reserve while it is kept."""
        return max(0, self.num_blocks - self._num_owned_blocks()) if self.is_kept(now) else 0

    def held_from(self, sequence: Sequence, blocks: int, now: float) -> tuple[int, int]:
        """Blocks and rows that the admission of a waiting sequence, which needs so many blocks, has to leave."""
        if not self.is_kept(now) or sequence in self.waiting:
            return 0, 0
        held_blocks = self.num_held_blocks(now) if self.fits_beside(blocks) else 0
        return held_blocks, max(0, self.num_rows - len(self.running))

    def fits_beside(self, blocks: int) -> bool:
        """Whether so many blocks fit beside a reserve in full use, whose sequences can each grow by a block."""
        return blocks + self.num_blocks + self.num_rows <= self._num_total_blocks

    def has_room(self, blocks: int) -> bool:
        """Whether the reserve has room for one more short sequence that needs so many blocks, all with room to grow."""
        num_running = len(self.running)
        return num_running < self.num_rows and self._num_owned_blocks() + blocks + num_running + 1 <= self.num_blocks

    def allowance(self, budget: int, demand: int) -> int:
        """Tokens that short ones may compute of a step's `budget`, of which others could use `demand`.

        At least half of what the decodes leave is the others', so that these go on however small it is.
        """
        return max(budget - demand, min(self.num_tokens, budget // 2))

    def check_invariants(self, waiting: WaitingQueue, running: dict[Sequence, None]) -> None:
        """Raise AssertionError where somebody is counted as short who is not placed here."""
        assert all(sequence in waiting for sequence in self.waiting), "the lane holds one that does not wait"
        assert self.running.keys() <= running.keys(), "the reserve counts one that does not run"

    def _num_owned_blocks(self) -> int:
        # Blocks that several share count for each: the reserve then seems fuller than it is, never emptier.
        return sum(sequence.num_held_blocks for sequence in self.running)
