"""The queue of a session, with sequences that the policy could not place."""

from __future__ import annotations

import pytest
from fakes import make_record

from scheduler_svc.sequence import LiveRequest, Sequence
from scheduler_svc.waiting_queue import QueueKey, WaitingQueue


def make_sequence(counter: int, arrival: float) -> Sequence:
    """Return a sequence of a request that came at `arrival`."""
    return LiveRequest(make_record(counter, age=100.0 - arrival), 100, 100.0).sequences[0]


def drain(queue: WaitingQueue) -> list[int]:
    """Return the counters in order, and leave the queue empty."""
    counters = []
    while (head := queue.peek()) is not None:
        counters.append(head[1].request_id[1])
        queue.remove(head[1])
    assert len(queue) == 0
    return counters


def make_queue(*entries: tuple[float, QueueKey]) -> tuple[WaitingQueue, list[Sequence]]:
    """Return a queue of sequences 1, 2, ..., each with its arrival and key, and the sequences."""
    queue = WaitingQueue()
    sequences = [make_sequence(counter, arrival) for counter, (arrival, _) in enumerate(entries, 1)]
    for sequence, (_, key) in zip(sequences, entries, strict=True):
        queue.push(sequence, key)
    return queue, sequences


def test_keys_order_what_has_one() -> None:
    """Rank first, then the key; equals in order of arrival in the queue."""
    queue, _ = make_queue((1.0, (1, (5.0,))), (2.0, (1, (4.0,))), (3.0, (0, (9.0,))), (4.0, (1, (4.0,))))
    assert drain(queue) == [3, 2, 4, 1]


def test_without_keys_first_come_is_first_served() -> None:
    """Where nothing has a key, arrival decides within a rank."""
    queue, _ = make_queue((3.0, (1, None)), (1.0, (1, None)), (2.0, (1, None)), (9.0, (0, None)))
    assert drain(queue) == [4, 2, 3, 1]


def test_one_without_a_key_takes_its_turn_by_arrival() -> None:
    """It goes before the policy's next if it came earlier, and behind where it came later."""
    queue, _ = make_queue((1.0, (1, (9.0,))), (2.0, (1, None)), (3.0, (1, (1.0,))), (1.5, (1, (0.0,))))
    # The policy's order is 4, 3, 1; the second came after the fourth and before the third.
    assert drain(queue) == [4, 2, 3, 1]


def test_rank_goes_before_arrival() -> None:
    """What has started goes first, with a key or without."""
    queue, _ = make_queue((1.0, (1, None)), (2.0, (0, (9.0,))))
    assert drain(queue) == [2, 1]
    queue, _ = make_queue((1.0, (1, (0.0,))), (2.0, (0, None)))
    assert drain(queue) == [2, 1]


def test_what_is_set_aside_gets_its_place_back() -> None:
    """Of either kind, and it is not in the queue in between."""
    queue, sequences = make_queue((1.0, (1, None)), (2.0, (1, (4.0,))), (3.0, (1, (4.0,))))
    entries = [queue.set_aside(), queue.set_aside()]
    assert [each in queue for each in sequences] == [False, False, True]
    for entry in entries:
        queue.put_back(entry)
    assert (len(queue), set(queue)) == (3, set(sequences))
    assert drain(queue) == [1, 2, 3]
    with pytest.raises(KeyError):
        queue.set_aside()


def test_the_key_that_peek_gives_is_the_one_pushed() -> None:
    """So a sequence that moves to another queue keeps its place, be it none."""
    for key in ((1, None), (0, (2.0, 3.0))):
        queue, sequences = make_queue((1.0, key))
        assert queue.peek() == (key, sequences[0])
