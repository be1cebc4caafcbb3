"""Telling what is stuck from what is idle, slow, or was not looked at."""

from __future__ import annotations

from octavo.rpc.progress import StallWatch


class Machine:
    """Something with work and a count of what it did, on a clock of its own."""

    def __init__(self, bound: float = 8.0) -> None:
        self.has_work = True
        self.count = 0
        self.now = 0.0
        self.watch = StallWatch(lambda: self.has_work, lambda: self.count, bound)

    def pass_time(self, seconds: float, step: float = 1.0) -> list[bool]:
        """Look every `step` seconds; returns the changes."""
        changes = []
        end = self.now + seconds
        while self.now < end:
            self.now += step
            if self.watch.look(self.now):
                changes.append(self.watch.is_stalled)
        return changes


def test_a_stall_is_told_once_and_its_end_too() -> None:
    """Work without progress for the bound is a stall, however long it lasts, and any progress is its end."""
    machine = Machine()
    assert machine.pass_time(100) == [True]
    machine.count += 1
    assert machine.pass_time(5) == [False]


def test_idle_is_healthy() -> None:
    """Without work nothing stalls, and time without work does not count later."""
    machine = Machine()
    machine.has_work = False
    assert machine.pass_time(100) == []
    machine.has_work = True
    assert machine.pass_time(6) == []


def test_slow_is_not_stuck() -> None:
    """One thing done within each bound is enough."""
    machine = Machine()
    for _ in range(20):
        assert machine.pass_time(7) == []
        machine.count += 1


def test_a_watcher_that_was_stopped_blames_nobody() -> None:
    """An hour between two looks counts as two intervals: it was the watcher that stood still."""
    machine = Machine()
    machine.pass_time(2)
    assert machine.pass_time(3600, step=3600) == []
    assert machine.watch.stuck_for <= 2 + 2 * machine.watch.interval
