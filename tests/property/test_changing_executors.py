"""Executors come and go under load, at random: nothing fails, no token changes, and load evens out.

The clock is made up: a step takes 50 ms and what a token adds, at every executor at once.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from cells import Cell, make_cell
from fakes import make_record, make_spec, undisturbed

from scheduler_svc.request_record import RequestRecord
from scheduler_svc.suspects import Loss

NUM_CHANGES = 20
ROUND_SECONDS = 0.05
EVEN_WITHIN = 10.0
"""Seconds from a change to the moment from which on all executors have about as much to do."""
EVEN_FOR = 0.5
SPEC = make_spec(num_blocks=120, max_num_seqs=16, max_num_batched_tokens=64)


class Traffic:
    """Requests that come at random to a cell whose executors change; some share beginnings."""

    def __init__(self, cell: Cell, seed: int) -> None:
        self.cell = cell
        self.chance = random.Random(seed)
        self.records: list[RequestRecord] = []

    def round(self) -> None:
        """Let new requests come, and each executor run a step."""
        for _ in range(self.chance.choice((0, 0, 1, 1, 2))):
            group = self.chance.randrange(6)
            prompt = [group] * 32 + [self.chance.randrange(40) for _ in range(self.chance.randrange(1, 20))]
            max_tokens = self.chance.randrange(5, 40)
            record = make_record(len(self.records) + 1, prompt, seed=len(self.records), max_tokens=max_tokens)
            self.records.append(record)
            self.cell.submit(record)
        for session in list(self.cell.executors):
            while self.cell.schedule(session) is not None:
                pass
        self.cell.expire(ROUND_SECONDS)
        for session in list(self.cell.executors):
            if self.cell.sent[session]:
                self.cell.run(session)

    def counts(self) -> list[int]:
        """How many sequences each executor has."""
        return [each.num_running + each.num_waiting for each in self.cell.engine.load().executors]

    def change(self) -> None:
        """Have an executor join, or leave in one of the ways in which they do."""
        sessions = sorted(self.cell.executors)
        if len(sessions) < 2 or (len(sessions) < 6 and self.chance.random() < 0.5):
            number = self.cell.add_executor(replace(SPEC, incarnation=f"{self.chance.getrandbits(128):032x}"))
            assert number not in sessions
            return
        session = self.chance.choice(sessions)
        if self.chance.random() < 0.25:
            self.cell.engine.set_draining(session, is_draining=True)
            self.round()
        self.cell.remove_executor(session, self.chance.choice([Loss.LEFT, Loss.HUNG]))


def is_even(counts: list[int]) -> bool:
    """Whether all have about as much to do: within a third of the mean of it, or three sequences."""
    mean = sum(counts) / len(counts)
    return all(abs(count - mean) <= max(3.0, mean / 3) for count in counts)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)])
def test_twenty_changes_under_load(seed: int) -> None:
    """After each change load is even within ten seconds, and stays so; in the end each request has had exactly
    the tokens that it would have had undisturbed.
    """
    cell = make_cell(SPEC, replace(SPEC, incarnation="1" * 32))
    traffic = Traffic(cell, seed)
    for _ in range(60):
        traffic.round()
    for number in range(NUM_CHANGES):
        traffic.change()
        since, even_since = cell.now, None
        while even_since is None or cell.now - even_since < EVEN_FOR:
            traffic.round()
            counts = traffic.counts()
            even_since = (even_since or cell.now) if is_even(counts) else None
            assert even_since is not None or cell.now - since < EVEN_WITHIN, (number, counts)
    cell.settle()
    assert len(traffic.records) > 100
    for record in traffic.records:
        assert cell.gateway.done[record.id].error is None
        assert cell.gateway.tokens[record.id, 0] == undisturbed(record, 0)[0]
