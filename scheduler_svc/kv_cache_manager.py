"""Which KV blocks each sequence of one executor session holds, and which are kept for those to come.

Where every layer of the model has a window, a block that all of them have passed is given up while its sequence runs
on: the null block stands for it in the table, which keeps its length. It stays cached, as those of sequences that have
ended do. A sequence that begins behind a cached prefix needs only the blocks of it that are within the window.

Such a sequence never holds more than its window and the tokens of two steps, however long its prompt is. So it gets
blocks chunk by chunk; what it has been admitted with but does not hold is *promised* to it, and not available.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items

from scheduler_svc.block_pool import NULL_BLOCK, BlockPool, OutOfBlocksError
from scheduler_svc.prefix_cache import Digest, PrefixCache, sha256
from scheduler_svc.sequence import NEVER, Sequence

STEPS_HELD = 2
"""Steps whose tokens a sequence holds blocks for beyond its window: what is in flight has passed nothing yet. With more
in flight its chunks may get shorter.
"""


class KVCacheManager:
    """The block ledger of one executor session; the tensors are the executor's.

    It alone changes a sequence's block_table, num_slots and publish_at.
    """

    def __init__(
        self, num_blocks: int, block_size: int, digest: Digest = sha256, *, window: int = 0, step_tokens: int = 0
    ) -> None:
        """num_blocks counts the null block; block_size, window and step_tokens are in tokens.

        window: how far back the widest layer reads, the reading token included; 0: some layer reads everything.
        step_tokens: most that a step computes; 0, or without a window: a sequence gets all its blocks at admission.
        """
        self.block_size = block_size
        self.window = window
        self._most_held_blocks = NEVER
        if window and step_tokens:
            self._most_held_blocks = -(-(window - 1 + STEPS_HELD * step_tokens) // block_size) + 1
        # Of the sequences that have not got all their blocks: how many these are, and how many are promised.
        self._growing: dict[Sequence, int] = {}
        self._promised: dict[Sequence, int] = {}
        self._num_promised = 0
        self._cache = PrefixCache(block_size, digest)
        self._pool = BlockPool(num_blocks, self._cache.forget)
        self._holders: dict[Sequence, None] = {}

    @property
    def num_total_blocks(self) -> int:
        """Blocks that can be owned."""
        return self._pool.num_total_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds and whose content is of no use."""
        return self._pool.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that nobody holds and whose content is kept."""
        return self._pool.num_cached_blocks

    def cached_blocks(self) -> list[int]:
        """Blocks that nobody holds and whose content is kept, least recently held first."""
        return self._pool.cached_blocks()

    @property
    def num_available_blocks(self) -> int:
        """Blocks that any sequence can be given: free and cached ones that are not promised."""
        return self._pool.num_available_blocks - self._num_promised

    def num_promised_blocks(self, sequence: Sequence) -> int:
        """Blocks that are available to this running sequence alone."""
        return self._promised.get(sequence, 0)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that can run when nobody else does, its last one, which is not computed,
        included.
        """
        fits = self._most_held_blocks <= self._pool.num_total_blocks
        return NEVER if fits else self.num_total_slots + 1

    @property
    def num_owned_blocks(self) -> int:
        """Blocks in the tables of sequences, each counted once."""
        return self._pool.num_owned_blocks

    @property
    def num_total_slots(self) -> int:
        """Tokens whose KV fits when one sequence holds every block."""
        return self._pool.num_total_blocks * self.block_size

    def blocks_needed(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that a sequence needs beside its table for the KV of its first num_tokens tokens, at any one time."""
        return min(self._num_lacking(sequence, num_tokens), self._most_held_blocks)

    def _num_lacking(self, sequence: Sequence, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self.block_size) - len(sequence.block_table))

    def blocks_taken(self, sequence: Sequence, num_tokens: int, prefix: Items[int]) -> int:
        """How many fewer blocks are available once a sequence has `prefix` and what else num_tokens tokens need."""
        num_there = prefix.count(NULL_BLOCK) + self._pool.num_held(prefix)
        return min(self._num_lacking(sequence, num_tokens) - num_there, self._most_held_blocks)

    def can_fit(self, sequence: Sequence, num_tokens: int, prefix: Items[int] = (), *, reserve: int = 0) -> bool:
        """Whether the blocks that it needs beside `prefix` are available, with `reserve` more left over."""
        num_available = self.num_available_blocks - reserve
        # Were all of a long prefix held by others, would it fit? If not, nobody needs to count how much of it is.
        if min(self._num_lacking(sequence, num_tokens) - len(prefix), self._most_held_blocks) > num_available:
            return False
        return self.blocks_taken(sequence, num_tokens, prefix) <= num_available

    def num_reclaimable_blocks(self, sequence: Sequence, prefix: Items[int] = ()) -> int:
        """Blocks that release would make available: those that no other table holds, nor is to hold as its prefix."""
        return sum(self._pool.reference_count(block) == 1 and block not in prefix for block in sequence.block_table)

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Return the blocks that hold the KV of a waiting sequence's first tokens; its last token is never among them.

        They stay what they are until blocks are next given out. Those that the window of the token that follows them
        has passed are not needed: null blocks come in their place.
        """
        if not sequence.request.record.reads_cache:
            return []
        most = self._most_cached_tokens(sequence)
        return self._find_in_window(sequence, most) if self.window else self._cache.find(sequence, most)

    def _find_in_window(self, sequence: Sequence, num_tokens: int) -> list[int]:
        end = num_tokens // self.block_size
        blocks = self._cache.find_each(sequence, end)
        # From the back: the longest prefix whose last blocks, as far as the window reaches, are all there.
        first = end
        for index in range(end - 1, -1, -1):
            if blocks[index] is None:
                end = first = index
                continue
            first = index
            if first <= self._num_passed(end * self.block_size):
                break
        return [NULL_BLOCK] * first + [block for block in blocks[first:end] if block is not None]

    def _num_passed(self, position: int) -> int:
        """Blocks, from the first, that no layer reads for the token at a position or a later one."""
        return max(0, position + 1 - self.window) // self.block_size

    def num_awaited_tokens(self, sequence: Sequence, prefix: Items[int]) -> int:
        """Tokens behind a waiting sequence's `prefix` whose KV others compute now, so that it can share theirs soon."""
        if not sequence.request.record.reads_cache:
            return 0
        num_more = self._most_cached_tokens(sequence) // self.block_size - len(prefix)
        return min(self._cache.num_computing(sequence, len(prefix)), max(0, num_more)) * self.block_size

    def num_foreseen_tokens(self, sequence: Sequence) -> int:
        """Of a sequence without blocks: first tokens whose KV is there, or will be once it is its turn."""
        if not sequence.request.record.reads_cache:
            return 0
        return self._cache.num_foreseen(sequence, self._most_cached_tokens(sequence)) * self.block_size

    def expect(self, sequence: Sequence) -> None:
        """Foresee what a sequence that waits for this executor will leave in the cache."""
        if sequence.request.record.writes_cache:
            self._cache.expect(sequence)

    def stop_expecting(self, sequence: Sequence) -> None:
        """Undo `expect`: it has been admitted, or has gone."""
        self._cache.stop_expecting(sequence)

    def _most_cached_tokens(self, sequence: Sequence) -> int:
        most = sequence.request.record.max_cached_tokens
        return sequence.num_tokens - 1 if most is None else min(most, sequence.num_tokens - 1)

    def allocate(
        self, sequence: Sequence, num_tokens: int, prefix: Items[int] = (), *, num_first_tokens: int | None = None
    ) -> tuple[int, ...]:
        """Give a sequence without blocks those of `prefix`, from find_prefix, and others, for its first num_tokens
        tokens. Returns its table. Raises OutOfBlocksError, nothing given.

        num_first_tokens: what it computes first, where the others can follow by `append`; `prefix` included.
        """
        if sequence in self._holders:
            raise ValueError(f"{sequence!r} holds blocks already")
        num_passed = prefix.count(NULL_BLOCK)
        num_taken = self.blocks_taken(sequence, num_tokens, prefix)
        self._check_available(num_taken, self.num_available_blocks)
        num_available = self._pool.num_available_blocks
        is_growing = num_first_tokens is not None and self._most_held_blocks <= self._pool.num_total_blocks
        self._pool.share(prefix[num_passed:])
        sequence.block_table.extend(prefix)
        try:
            self.append(sequence, num_first_tokens if is_growing and num_first_tokens else num_tokens)
        except Exception:
            self._pool.release(sequence.block_table[num_passed:])
            sequence.block_table.clear()
            raise
        self._holders[sequence] = None
        if self._num_lacking(sequence, num_tokens):
            self._growing[sequence] = -(-num_tokens // self.block_size)
            self._promise(sequence, num_taken - (num_available - self._pool.num_available_blocks))
        sequence.num_passed_blocks = num_passed
        writes_cache = sequence.request.record.writes_cache
        if writes_cache or self.window:
            sequence.publish_at = (len(prefix) + 1) * self.block_size
        if writes_cache:
            self._cache.begin(sequence, len(prefix))
        return tuple(sequence.block_table)

    def append(self, sequence: Sequence, num_tokens: int) -> tuple[int, ...]:
        """Grow a table to the first num_tokens tokens and return the new blocks, or raise OutOfBlocksError."""
        num_lacking = self._num_lacking(sequence, num_tokens)
        self._check_available(num_lacking, self.num_available_blocks + self._promised.get(sequence, 0))
        blocks = self._pool.allocate(num_lacking)
        sequence.block_table.extend(blocks)
        sequence.num_slots = len(sequence.block_table) * self.block_size
        if sequence in self._growing:
            self._promise(sequence, self._promised[sequence] - len(blocks))
        return tuple(blocks)

    def _check_available(self, wanted: int, available: int) -> None:
        if wanted > available:
            raise OutOfBlocksError(f"{wanted} blocks wanted, {available} of {self.num_total_blocks} available")

    def is_growing(self, sequence: Sequence) -> bool:
        """Whether a running sequence has not got the blocks for all tokens that it was admitted with."""
        return sequence in self._growing

    def num_growable_tokens(self, sequence: Sequence) -> int:
        """How many of a running sequence's tokens there are blocks for, its own and those that it can be given now."""
        num_available = self.num_available_blocks + self._promised.get(sequence, 0)
        return (len(sequence.block_table) + num_available) * self.block_size

    def _promise(self, sequence: Sequence, num_blocks: int) -> None:
        """Promise so many blocks to a sequence, but none once it lacks none."""
        lacking = self._growing[sequence] - len(sequence.block_table)
        promised = max(0, min(num_blocks, lacking))
        self._num_promised += promised - self._promised.get(sequence, 0)
        self._promised[sequence] = promised
        if lacking <= 0:
            del self._growing[sequence], self._promised[sequence]

    def append_block(self, sequence: Sequence) -> tuple[int, ...]:
        """Grow a table by one block and return it, or raise OutOfBlocksError."""
        if not self.can_append_block(sequence):
            raise OutOfBlocksError(f"a block wanted, none of {self.num_total_blocks} available")
        block = self._pool.take()
        sequence.block_table.append(block)
        sequence.num_slots += self.block_size
        if sequence in self._growing:
            self._promise(sequence, self._promised[sequence] - 1)
        return (block,)

    def can_append_block(self, sequence: Sequence) -> bool:
        """Whether append_block has a block for a running sequence."""
        return self.num_available_blocks > 0 or (sequence in self._promised and self._promised[sequence] > 0)

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        """Keep the blocks that the first num_tokens tokens fill: committed, computed, and all of it finite. Take back
        those that every layer's window has passed: rows in flight, which compute later tokens, do not read them either.

        Call it once num_tokens has reached sequence.publish_at; sets the next such mark.
        """
        if sequence.request.record.writes_cache:
            for index in range(sequence.publish_at // self.block_size - 1, num_tokens // self.block_size):
                block = sequence.block_table[index]
                if self._cache.publish(sequence, index, block):
                    self._pool.keep(block)
        sequence.publish_at = (num_tokens // self.block_size + 1) * self.block_size
        if self.window:
            self._release_passed(sequence, self._num_passed(num_tokens))

    def _release_passed(self, sequence: Sequence, num_passed: int) -> None:
        first, table = sequence.num_passed_blocks, sequence.block_table
        if num_passed > first:
            num_available = self._pool.num_available_blocks
            self._pool.release(table[first:num_passed])
            if sequence in self._growing:
                # What others share does not come back, and cannot be promised.
                gained = self._pool.num_available_blocks - num_available
                self._promise(sequence, self._promised[sequence] + gained)
            table[first:num_passed] = [NULL_BLOCK] * (num_passed - first)
            sequence.num_passed_blocks = num_passed

    def release(self, sequence: Sequence) -> None:
        """Take back every block of a sequence; KeyError where it holds none. What it has published stays cached."""
        del self._holders[sequence]
        if sequence in self._growing:
            self._num_promised -= self._promised.pop(sequence)
            del self._growing[sequence]
        if sequence.publish_at != NEVER:
            if sequence.request.record.writes_cache:
                self._cache.end(sequence, sequence.publish_at // self.block_size - 1)
            sequence.publish_at = NEVER
        self._pool.release(sequence.block_table[sequence.num_passed_blocks :])
        sequence.block_table.clear()
        sequence.num_slots = sequence.num_passed_blocks = 0

    def flush(self) -> int:
        """Forget every prefix: nobody takes what is there now, owned or not. Returns how many blocks became free."""
        num_cached_blocks = self._pool.num_cached_blocks
        for block in self._cache.blocks():
            self._cache.forget(block)
            self._pool.unkeep(block)
        return num_cached_blocks

    def check_invariants(self) -> None:
        """Raise AssertionError unless free + cached + owned = total, each count is the number of tables with the block,
        and what is published is what its holders have.
        """
        self._pool.check_invariants()
        assert self._num_promised == sum(self._promised.values()), "promises are miscounted"
        assert self._promised.keys() == self._growing.keys() <= self._holders.keys(), "a promise to who does not grow"
        assert all(promised >= 0 for promised in self._promised.values())
        assert self.num_available_blocks >= 0, "more is promised than there is"
        self._cache.check_invariants(set(self._holders))
        holders: Counter[int] = Counter()
        for sequence in self._holders:
            table = sequence.block_table
            assert table, f"{sequence!r} is a holder without blocks"
            num_passed = sequence.num_passed_blocks
            assert num_passed <= self._num_passed(sequence.num_computed_tokens) if self.window else num_passed == 0, (
                f"{sequence!r} has given up a block that it reads"
            )
            assert table[:num_passed] == [NULL_BLOCK] * num_passed
            held = table[num_passed:]
            assert len(set(held)) == len(held), f"{sequence!r} holds a block twice: {table}"
            assert sequence.num_slots == len(table) * self.block_size
            holders.update(held)
            for index, block in enumerate(table[: sequence.num_tokens // self.block_size]):
                if block != NULL_BLOCK:
                    self._cache.check_entry(sequence, index, block)
        assert NULL_BLOCK not in holders, "a table holds the null block where a layer reads"
        for block, count in holders.items():
            assert count == self._pool.reference_count(block), f"block {block}: {count} tables, counted otherwise"
        assert self._pool.num_available_blocks + len(holders) == self._pool.num_total_blocks, "blocks are missing"
        num_idle_entries = sum(block not in holders for block in self._cache.blocks())
        assert num_idle_entries == self._pool.num_cached_blocks, "cached blocks and their entries differ"
