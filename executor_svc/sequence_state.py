"""Everything the executor knows of each stay of a sequence, by handle.

A stay is live from its NewSequence until it is released, ends (stop token, max_tokens, max_model_len) or fails. A
live stay has a slot: its place in columns, so that a step reads and writes the state of its rows by vectorized
indexing. A stay that ended or failed gives its slot back at once and leaves only its handle, until the scheduler
releases it: later rows are skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from executor_svc.batch import Limits, NewSequence, StepBatch
from executor_svc.kv_cache import NULL_BLOCK
from executor_svc.sampler_state import SamplerState

UNKNOWN = -1
"""Stands for the slot of a handle that is not known."""
ENDED = -2
"""Stands for the slot of a stay that has ended or failed."""


class SequenceTable:
    """The stays of one session. Owned by the device thread."""

    def __init__(self, limits: Limits) -> None:
        capacity = limits.max_num_seqs
        self._limits = limits
        self._max_blocks = -(-limits.max_model_len // limits.block_size)
        self._slots: dict[int, int] = {}
        self._ended: set[int] = set()
        self._free = list(range(capacity - 1, -1, -1))
        # Without their tokens, which are in the column.
        self._records: dict[int, NewSequence] = {}
        self._stop_token_ids: list[frozenset[int]] = [frozenset()] * capacity
        self._handles = [0] * capacity
        self.sampler = SamplerState(capacity)
        # Zeroed by the system page by page on first touch: a slot takes memory for the tokens it really had.
        self.tokens = np.zeros((capacity, limits.max_model_len), dtype=np.int32)
        """int32 [slots, max_model_len]: prompt and output."""
        self.block_tables = np.full((capacity, self._max_blocks), NULL_BLOCK, dtype=np.int32)
        """int32 [slots, most blocks of a sequence], null blocks after the sequence's own. Blocks that every window has
        passed stay as they are, though others own them by now; of a cached prefix they are null from the start.
        """
        self.num_tokens = np.zeros(capacity, dtype=np.int64)
        """int64 [slots]: known tokens."""
        self.num_computed_tokens = np.zeros(capacity, dtype=np.int64)
        """int64 [slots]: tokens whose KV is computed. Between steps a live stay has one or more that are not."""
        self.num_blocks = np.zeros(capacity, dtype=np.int64)
        """int64 [slots]: length of the block table."""
        self.num_pending = np.zeros(capacity, dtype=np.int64)
        """int64 [slots]: how many of the known tokens, the last ones, are counted but still being sampled."""
        self._end_at = np.zeros(capacity, dtype=np.int64)

    def __contains__(self, handle: int) -> bool:
        """Whether the handle names a stay that is live, or has ended and is not released."""
        return handle in self._slots or handle in self._ended

    def __len__(self) -> int:
        """Live stays."""
        return len(self._slots)

    def slots(self, handles: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the slot of each handle, int64 [R], with UNKNOWN and ENDED for those without one."""
        get, ended = self._slots.get, self._ended
        found = [get(handle, UNKNOWN) for handle in handles]
        if UNKNOWN in found and ended:
            found = [ENDED if handle in ended else slot for handle, slot in zip(handles, found, strict=True)]
        return np.array(found, dtype=np.int64)

    def add(self, sequence: NewSequence, token_ids: npt.NDArray[np.int64] | None = None) -> None:
        """Begin a stay without blocks, nothing computed but what is cached.

        Its record is sound and its handle new (see input_batch). `token_ids`: the record's, where they are an array
        already.
        """
        if not self._free:
            self._grow()
        slot = self._free.pop()
        stopping, num_tokens = sequence.stopping, len(sequence.token_ids)
        self._slots[sequence.handle] = slot
        self._records[slot] = replace(sequence, token_ids=())
        self._handles[slot] = sequence.handle
        self._stop_token_ids[slot] = frozenset(stopping.stop_token_ids)
        self._end_at[slot] = min(sequence.num_prompt_tokens + stopping.max_tokens, self._limits.max_model_len)
        self.tokens[slot, :num_tokens] = sequence.token_ids if token_ids is None else token_ids
        self.num_tokens[slot] = num_tokens
        self.num_computed_tokens[slot] = sequence.num_cached_tokens
        self.sampler.add(slot, sequence)

    def add_ended(self, handle: int) -> None:
        """Know a handle whose stay failed before it began."""
        self._ended.add(handle)

    def end(self, handle: int) -> None:
        """End a stay: its state is gone, its later rows are skipped until it is released. Unknown handles are
        ignored.
        """
        if handle in self._slots:
            self._forget(handle)
            self._ended.add(handle)

    def lose(self, batch: StepBatch) -> None:
        """End the stays of a batch's rows, of those too that had not begun."""
        for sequence in batch.new_sequences:
            if sequence.handle not in self:
                self.add_ended(sequence.handle)
        for handle in batch.handles:
            self.end(handle)

    def release(self, handles: Iterable[int]) -> None:
        """Forget stays. Unknown handles are ignored."""
        for handle in handles:
            if handle in self._slots:
                self._forget(handle)
            self._ended.discard(handle)

    def clear(self) -> None:
        """Forget everything: a new session begins."""
        self.release([*self._slots, *self._ended])

    def append_blocks(self, slot: int, block_ids: npt.NDArray[np.int64]) -> bool:
        """Lengthen a block table; False, and nothing changed, where it would be longer than any sequence needs."""
        start = int(self.num_blocks[slot])
        end = start + len(block_ids)
        if end > self._max_blocks:
            return False
        self.block_tables[slot, start:end] = block_ids
        self.num_blocks[slot] = end
        return True

    def append_tokens(self, slots: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]) -> None:
        """Append one sampled token to each of the distinct `slots`, and end the stays that this ends."""
        before = self.num_tokens[slots]
        self.tokens[slots, before] = token_ids
        self.num_tokens[slots] = before + 1
        slot_list, token_list = slots.tolist(), token_ids.tolist()
        self.sampler.append(slot_list, token_list)
        full = (before + 1 >= self._end_at[slots]).tolist()
        for slot, token_id, is_full in zip(slot_list, token_list, full, strict=True):
            if is_full or token_id in self._stop_token_ids[slot]:
                self.end(self._handles[slot])

    def expect_tokens(self, slots: npt.NDArray[np.int64]) -> None:
        """Count a token that is being sampled for each of the distinct `slots`, and end the stays that are full then.

        Until `settle_tokens` its id is not known here.
        """
        after = self.num_tokens[slots] + 1
        self.num_tokens[slots] = after
        self.num_pending[slots] += 1
        for slot in slots[after >= self._end_at[slots]].tolist():
            self.end(self._handles[slot])

    def settle_tokens(
        self, slots: npt.NDArray[np.int64], places: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]
    ) -> list[int]:
        """Take in the expected token of each of the distinct `slots`, by its index in the sequence.

        Return the handles of the stays that one of their stop tokens has ended.
        """
        self.tokens[slots, places] = token_ids
        self.num_pending[slots] -= 1
        slot_list, token_list = slots.tolist(), token_ids.tolist()
        self.sampler.append(slot_list, token_list)
        stopped = [
            self._handles[slot]
            for slot, token_id in zip(slot_list, token_list, strict=True)
            if token_id in self._stop_token_ids[slot]
        ]
        for handle in stopped:
            self.end(handle)
        return stopped

    def check_invariants(self) -> None:
        """Raise AssertionError where counters do not fit together or sampler state is not the rebuild from the
        record.
        """
        assert not self._slots.keys() & self._ended, "a stay is both live and ended"
        taken = set(self._slots.values())
        assert len(taken) == len(self._slots), "two stays share a slot"
        assert taken.isdisjoint(self._free), "a free slot is taken"
        assert len(taken) + len(self._free) == len(self.num_tokens), "a slot is lost"
        assert self.sampler.slots_with_more <= taken, "sampler state without a stay"
        for handle, slot in self._slots.items():
            assert self._handles[slot] == handle, f"slot {slot} names another handle than {handle}"
            num_tokens, num_blocks = int(self.num_tokens[slot]), int(self.num_blocks[slot])
            computed = int(self.num_computed_tokens[slot])
            assert 0 <= self.num_pending[slot] < num_tokens, f"handle {handle}: waits for tokens that are not counted"
            assert 0 <= computed < num_tokens <= self._limits.max_model_len, f"handle {handle}: counters out of order"
            assert computed <= num_blocks * self._limits.block_size, f"handle {handle}: computed tokens without a block"
            table = self.block_tables[slot]
            read = table[self._limits.num_passed_blocks(computed) : num_blocks]
            assert (read != NULL_BLOCK).all(), f"handle {handle}: the null block is where a layer reads"
            assert (table[num_blocks:] == NULL_BLOCK).all(), f"handle {handle}: blocks past the end of its table"
            self.sampler.check_equal(slot, self.record(handle))
        free = np.array(self._free, dtype=np.int64)
        assert not self.num_computed_tokens[free].any(), "a free slot has computed tokens"
        assert not self.num_pending[free].any(), "a free slot waits for a token"
        assert not self.block_tables[free].any(), "a free slot has blocks"

    def record(self, handle: int) -> NewSequence:
        """Return the full record of a live stay as it stands: what a NewSequence would carry now."""
        slot = self._slots[handle]
        known = self.num_tokens[slot] - self.num_pending[slot]
        return replace(self._records[slot], token_ids=tuple(self.tokens[slot, :known].tolist()))

    def _forget(self, handle: int) -> None:
        slot = self._slots.pop(handle)
        del self._records[slot]
        self.sampler.remove(slot)
        self.block_tables[slot, : self.num_blocks[slot]] = NULL_BLOCK
        self.num_tokens[slot] = self.num_computed_tokens[slot] = self.num_blocks[slot] = self.num_pending[slot] = 0
        self._free.append(slot)

    def _grow(self) -> None:
        """Double the slots. A scheduler may keep more stays than fit in one step; it seldom does."""
        old = len(self.num_tokens)
        self._free.extend(range(2 * old - 1, old - 1, -1))
        self._stop_token_ids.extend([frozenset()] * old)
        self._handles.extend([0] * old)
        self.sampler.grow(2 * old)
        self.tokens = np.concatenate((self.tokens, np.zeros_like(self.tokens)))
        self.block_tables = np.concatenate((self.block_tables, np.zeros_like(self.block_tables)))
        columns = (self.num_tokens, self.num_computed_tokens, self.num_blocks, self.num_pending, self._end_at)
        self.num_tokens, self.num_computed_tokens, self.num_blocks, self.num_pending, self._end_at = (
            np.concatenate((column, np.zeros(old, dtype=np.int64))) for column in columns
        )
