"""A priority queue whose items can also leave from the middle."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any, Generic, TypeAlias, TypeVar

Item = TypeVar("Item")
Entry: TypeAlias = tuple[tuple[Any, ...], int, Item]
"""Key, serial number, item."""

# Dead entries are swept once they outnumber the live ones by this: the sweep is paid for by the removals before it.
_SLACK = 16


class KeyedHeap(Generic[Item]):
    """Distinct hashable items in the order of their keys; equal keys keep the order of arrival.

    Keys are tuples of numbers. push, pop and remove cost O(log n) amortized; nothing is ever sorted anew.
    """

    def __init__(self) -> None:
        self._heap: list[Entry[Item]] = []
        # An entry is live where its serial is the item's: a removed item may come back under another.
        self._serials: dict[Item, int] = {}
        self._next_serial = 0

    def __len__(self) -> int:
        return len(self._serials)

    def __contains__(self, item: Item) -> bool:
        return item in self._serials

    def __iter__(self) -> Iterator[Item]:
        """All items, in no order that means anything."""
        return iter(self._serials)

    def push(self, item: Item, key: tuple[Any, ...]) -> None:
        """Add an item that is not in the queue."""
        if item in self._serials:
            raise ValueError(f"{item!r} is in the queue already")
        self._serials[item] = self._next_serial
        heapq.heappush(self._heap, (key, self._next_serial, item))
        self._next_serial += 1

    def peek(self) -> tuple[tuple[Any, ...], Item] | None:
        """The first item with its key, or None where the queue is empty."""
        heap = self._heap
        while heap:
            key, serial, item = heap[0]
            if self._serials.get(item) == serial:
                return key, item
            heapq.heappop(heap)
        return None

    def set_aside(self) -> Entry[Item]:
        """Take out the first item for a while. `put_back` gives it its place again. KeyError where there is none."""
        if self.peek() is None:
            raise KeyError("the queue is empty")
        entry = heapq.heappop(self._heap)
        del self._serials[entry[2]]
        return entry

    def put_back(self, entry: Entry[Item]) -> None:
        """Give an item that was set aside its old place, before equals that came later."""
        self._serials[entry[2]] = entry[1]
        heapq.heappush(self._heap, entry)

    def remove(self, item: Item) -> None:
        """Take out an item, wherever it stands. KeyError where it is not in the queue."""
        del self._serials[item]
        if len(self._heap) > 2 * len(self._serials) + _SLACK:
            self._heap = [entry for entry in self._heap if self._serials.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
