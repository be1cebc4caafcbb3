"""Which blocks hold the KV of which tokens, so that equal beginnings are computed once.

A full block is known by the hash of its tokens, of all tokens before them, and of who may share them: a chain of
sha256, whose root is made of the model's revision, the tenant and the request's salt, each with its name and length in
front. So no salt can spell another tenant's root. What is found is compared token by token as well: a collision finds
nothing.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from operator import is_

from scheduler_svc.request_record import RequestRecord
from scheduler_svc.sequence import LiveRequest, Sequence

MOST_FINDS = 32
"""For so many sequences what they found is remembered: more than a step ever looks up while they wait."""

Digest = Callable[[bytes], bytes]
_Entry = tuple[bytes, tuple[int, ...]]


def sha256(data: bytes) -> bytes:
    """Return the digest, 32 bytes."""
    return hashlib.sha256(data).digest()


class PrefixCache:
    """The index of one executor session. The blocks are the block pool's; a block has at most one entry.

    Besides what is there it knows what is being computed: blocks of running sequences that are not full yet.
    """

    def __init__(self, block_size: int, digest: Digest = sha256) -> None:
        """block_size: tokens. digest: bytes of one length for bytes of any."""
        self._block_size = block_size
        self._digest = digest
        self._blocks: dict[bytes, int] = {}
        self._entries: dict[int, _Entry] = {}
        self._computing: dict[bytes, Sequence] = {}
        # What those that wait here will compute or take: how many of them, by hash; and how many blocks of each.
        self._expected: dict[bytes, int] = {}
        self._expecting: dict[Sequence, int] = {}
        # What the latest who asked have found, oldest first: those that wait for room are looked up in every step.
        self._finds: dict[Sequence, tuple[list[int], list[_Entry]]] = {}

    def __len__(self) -> int:
        """Blocks with an entry."""
        return len(self._entries)

    def find(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Return the blocks with the KV of a sequence's first tokens, whole blocks within num_tokens."""
        hashes = self._hashes(sequence, num_tokens // self._block_size)
        found, entries = self._find_again(sequence, len(hashes))
        for index in range(len(found), len(hashes)):
            block = self._blocks.get(hashes[index])
            if block is None or (entry := self._entries[block])[1] != self._tokens(sequence, index):
                break
            found.append(block)
            entries.append(entry)
        self._finds[sequence] = (found, entries)
        if len(self._finds) > MOST_FINDS:
            del self._finds[next(iter(self._finds))]
        return found.copy()

    def find_each(self, sequence: Sequence, num_blocks: int) -> list[int | None]:
        """Return, for each of a sequence's first num_blocks blocks, the one with its KV, None where there is none."""
        found: list[int | None] = []
        for index, block_hash in enumerate(self._hashes(sequence, num_blocks)):
            block = self._blocks.get(block_hash)
            is_there = block is not None and self._entries[block][1] == self._tokens(sequence, index)
            found.append(block if is_there else None)
        return found

    def _find_again(self, sequence: Sequence, most: int) -> tuple[list[int], list[_Entry]]:
        """What was found for a sequence before and is there yet: its tokens need not be compared again."""
        blocks, entries = self._finds.pop(sequence, ([], []))
        # The same entries, not equal ones: a block that was given up and published anew has another.
        is_there = list(map(is_, map(self._entries.get, blocks), entries))
        num_found = min(most, len(blocks) if all(is_there) else is_there.index(False))
        return blocks[:num_found], entries[:num_found]

    def num_computing(self, sequence: Sequence, first: int) -> int:
        """How many blocks of a sequence, from the one numbered `first` on, are being computed for others just now."""
        hashes = self._hashes(sequence, (sequence.num_tokens - 1) // self._block_size)
        num_blocks = 0
        while first + num_blocks < len(hashes) and hashes[first + num_blocks] in self._computing:
            num_blocks += 1
        return num_blocks

    def num_foreseen(self, sequence: Sequence, num_tokens: int) -> int:
        """How many of a sequence's first blocks, within num_tokens, are there, or will be: computed for others now, or
        part of what waits here. By their hashes alone.
        """
        blocks, computing, expected = self._blocks, self._computing, self._expected
        num_blocks = 0
        for block_hash in self._hashes(sequence, num_tokens // self._block_size):
            if not (block_hash in blocks or block_hash in computing or block_hash in expected):
                break
            num_blocks += 1
        return num_blocks

    def expect(self, sequence: Sequence) -> None:
        """Note that a sequence waits here, whose full blocks will be there."""
        hashes = self._hashes(sequence, sequence.num_tokens // self._block_size)
        self._expecting[sequence] = len(hashes)
        for block_hash in hashes:
            self._expected[block_hash] = self._expected.get(block_hash, 0) + 1

    def stop_expecting(self, sequence: Sequence) -> None:
        """Note that it does not wait here any more; nothing where it was not expected."""
        for block_hash in self._hashes(sequence, self._expecting.pop(sequence, 0)):
            if self._expected[block_hash] == 1:
                del self._expected[block_hash]
            else:
                self._expected[block_hash] -= 1

    def begin(self, sequence: Sequence, first: int) -> None:
        """Note that a sequence computes its full blocks from the one numbered `first` on."""
        self._finds.pop(sequence, None)
        for block_hash in self._hashes(sequence, sequence.num_tokens // self._block_size)[first:]:
            self._computing.setdefault(block_hash, sequence)

    def end(self, sequence: Sequence, first: int) -> None:
        """Note that it computes nothing more, from the block numbered `first` on."""
        for block_hash in sequence.block_hashes[1][first:]:
            if self._computing.get(block_hash) is sequence:
                del self._computing[block_hash]

    def publish(self, sequence: Sequence, index: int, block: int) -> bool:
        """Enter the full block numbered `index` of a sequence, unless one with the same content is known."""
        token_ids = self._tokens(sequence, index)
        size, hashes = sequence.block_hashes
        if hashes and size == self._block_size and len(hashes) == index:
            # The next block of an output: the hash is made here, with the tokens at hand.
            hashes.append(self._next_hash(hashes[-1], token_ids))
        block_hash = self._hashes(sequence, index + 1)[index]
        self._computing.pop(block_hash, None)
        if block_hash in self._blocks:
            return False
        self._blocks[block_hash] = block
        self._entries[block] = (block_hash, token_ids)
        return True

    def forget(self, block: int) -> None:
        """Drop the entry of a block; KeyError where it has none."""
        block_hash, _ = self._entries.pop(block)
        del self._blocks[block_hash]

    def blocks(self) -> list[int]:
        """Blocks with an entry, those published first in front."""
        return list(self._entries)

    def check_entry(self, sequence: Sequence, index: int, block: int) -> None:
        """Raise AssertionError where a block in a sequence's table is published as something else than it holds."""
        entry = self._entries.get(block)
        if entry is not None:
            assert entry[1] == self._tokens(sequence, index), f"block {block} is published with other tokens"
            assert entry[0] == self._hashes(sequence, index + 1)[index], (
                f"block {block} is published under another hash"
            )

    def check_invariants(self, running: set[Sequence]) -> None:
        """Raise AssertionError unless hashes and blocks are one to one, and what is being computed has a computer."""
        assert {block: block_hash for block_hash, block in self._blocks.items()} == {
            block: block_hash for block, (block_hash, _) in self._entries.items()
        }
        assert sum(self._expected.values()) == sum(self._expecting.values())
        assert set(self._computing.values()) <= running, "a block is awaited from a sequence that does not run"

    def _next_hash(self, parent: bytes, token_ids: tuple[int, ...]) -> bytes:
        return self._digest(parent + array("I", token_ids).tobytes())

    def _tokens(self, sequence: Sequence, index: int) -> tuple[int, ...]:
        start = index * self._block_size
        return sequence.tokens_between(start, start + self._block_size)

    def _hashes(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """Return the hashes of the first num_blocks blocks; each is made once, a prompt's once for all choices."""
        size, hashes = sequence.block_hashes
        if size != self._block_size:
            hashes = list(self._prompt_hashes(sequence.request))
            sequence.block_hashes = (self._block_size, hashes)
        if len(hashes) < num_blocks:
            parent = hashes[-1] if hashes else _root(sequence.request.record, self._digest)
            for index in range(len(hashes), num_blocks):
                parent = self._next_hash(parent, self._tokens(sequence, index))
                hashes.append(parent)
        return hashes if len(hashes) == num_blocks else hashes[:num_blocks]

    def _prompt_hashes(self, request: LiveRequest) -> list[bytes]:
        size, hashes = request.prompt_hashes
        if size != self._block_size:
            hashes = []
            parent = _root(request.record, self._digest)
            prompt = array("I", request.record.prompt_token_ids)
            data, width = prompt.tobytes(), self._block_size * prompt.itemsize
            for end in range(width, len(data) + 1, width):
                parent = self._digest(parent + data[end - width : end])
                hashes.append(parent)
            request.prompt_hashes = (self._block_size, hashes)
        return hashes


def _root(record: RequestRecord, digest: Digest) -> bytes:
    parts = (("revision", record.model_revision), ("tenant", record.tenant), ("salt", record.cache_salt))
    data = bytearray()
    for name, value in parts:
        encoded = value.encode("utf-8", "surrogatepass")
        data += f"{name}:{len(encoded)}:".encode() + encoded
    return digest(bytes(data))
