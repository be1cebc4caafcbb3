"""The queue that items can leave from the middle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.keyed_heap import KeyedHeap


def drain(heap: KeyedHeap[str]) -> list[str]:
    """Return the items in order, and leave the heap empty."""
    items = []
    while (head := heap.peek()) is not None:
        items.append(head[1])
        heap.remove(head[1])
    return items


def test_equal_keys_keep_the_order_of_arrival() -> None:
    """The smallest key goes first, and among equals the first to come."""
    heap: KeyedHeap[str] = KeyedHeap()
    for item, key in (("b", 1.0), ("c", 2.0), ("a", 1.0), ("z", 0.5)):
        heap.push(item, (key,))
    assert drain(heap) == ["z", "b", "a", "c"]


def test_an_item_that_comes_back_counts_once_and_under_its_new_key() -> None:
    """The entry that a removal left behind is dead, even for the same item."""
    heap: KeyedHeap[str] = KeyedHeap()
    heap.push("a", (1.0,))
    heap.push("b", (2.0,))
    heap.remove("a")
    assert "a" not in heap
    heap.push("a", (3.0,))
    assert len(heap) == 2
    assert drain(heap) == ["b", "a"]


def test_misuse_is_an_error() -> None:
    """An item is in the queue at most once, and only what is in it can be removed."""
    heap: KeyedHeap[str] = KeyedHeap()
    heap.push("a", (1.0,))
    with pytest.raises(ValueError, match="already"):
        heap.push("a", (2.0,))
    with pytest.raises(KeyError):
        heap.remove("b")


def test_removed_items_do_not_pile_up() -> None:
    """However many come and go, the heap holds at most twice the live ones and a constant."""
    heap: KeyedHeap[int] = KeyedHeap()
    for item in range(10_000):
        heap.push(item, (float(item),))
        if item >= 10:
            heap.remove(item - 5)
    assert len(heap._heap) <= 2 * len(heap) + 17


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.booleans())))
def test_agrees_with_sorting(operations: list[tuple[int, int, bool]]) -> None:
    """After any pushes and removals the order is that of a stable sort by key."""
    heap: KeyedHeap[int] = KeyedHeap()
    model: dict[int, tuple[float, ...]] = {}
    for item, key, is_push in operations:
        if is_push and item not in model:
            heap.push(item, (float(key),))
            model[item] = (float(key),)
        elif not is_push and item in model:
            heap.remove(item)
            del model[item]
        assert set(heap) == set(model)
    expected = sorted(model, key=lambda item: model[item])
    got = []
    while (head := heap.peek()) is not None:
        assert head[0] == model[head[1]]
        got.append(head[1])
        heap.remove(head[1])
    assert got == expected
