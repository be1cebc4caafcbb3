"""The queue of one executor session: in the policy's order, and by arrival where the policy gave no order."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler_svc.keyed_heap import Entry, KeyedHeap
from scheduler_svc.sequence import Sequence

QueueKey = tuple[int, tuple[float, ...] | None]
"""Rank, which goes before everything else, smaller first; then the policy's admission key, None where it gave none."""


class WaitingQueue:
    """Waiting sequences, each once.

    Those without a key take their turn by arrival: the oldest of them goes before whoever is the policy's next, unless
    that one is older still. So a policy that orders nothing leaves first come, first served, and what it could not
    place is overtaken by nobody who came later.
    """

    def __init__(self) -> None:
        self._placed: KeyedHeap[Sequence] = KeyedHeap()
        self._unplaced: KeyedHeap[Sequence] = KeyedHeap()

    def __len__(self) -> int:
        return len(self._placed) + len(self._unplaced)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._placed or sequence in self._unplaced

    def __iter__(self) -> Iterator[Sequence]:
        """All sequences, in no order that means anything."""
        yield from self._placed
        yield from self._unplaced

    def push(self, sequence: Sequence, key: QueueKey) -> None:
        """Add a sequence that is not in the queue."""
        rank, order = key
        if order is None:
            self._unplaced.push(sequence, (rank, sequence.request.arrival))
        else:
            self._placed.push(sequence, (rank, order))

    def peek(self) -> tuple[QueueKey, Sequence] | None:
        """The first sequence with its key, or None where the queue is empty."""
        heap = self._first_heap()
        head = heap.peek()
        if head is None:
            return None
        (rank, order), sequence = head
        return (rank, order if heap is self._placed else None), sequence

    def set_aside(self) -> Entry[Sequence]:
        """Take out the first sequence; `put_back` gives it its place again. KeyError where there is none."""
        return self._first_heap().set_aside()

    def put_back(self, entry: Entry[Sequence]) -> None:
        """Give a sequence that was set aside its old place, before equals that came later."""
        _, order = entry[0]
        (self._placed if isinstance(order, tuple) else self._unplaced).put_back(entry)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence, wherever it stands. KeyError where it is not in the queue."""
        (self._unplaced if sequence in self._unplaced else self._placed).remove(sequence)

    def _first_heap(self) -> KeyedHeap[Sequence]:
        unplaced = self._unplaced.peek()
        if unplaced is None:
            return self._placed
        placed = self._placed.peek()
        if placed is None:
            return self._unplaced
        rank, arrival = unplaced[0]
        goes_first = (rank, arrival) <= (placed[0][0], placed[1].request.arrival)
        return self._unplaced if goes_first else self._placed
