"""C11: what others send moves a sequence that decodes by a bounded number of steps, whatever the policy."""

from __future__ import annotations

import itertools

import pytest
from cells import Cell, make_cell
from fakes import make_record, make_spec

from scheduler_svc.batch import ExecutorSpec
from scheduler_svc.burst_reserve import ReserveSettings
from scheduler_svc.policies.registry import BUILT_IN, load_policy

ROOMY = make_spec(num_blocks=500, max_num_seqs=64, max_num_batched_tokens=32, max_model_len=400)
TIGHT = make_spec(num_blocks=24, max_num_seqs=64, max_num_batched_tokens=32, max_model_len=400)
"""Blocks for two or three of the attacker's prompts."""


def gaps(cell: Cell, handle: int) -> list[int]:
    """Steps from each row of a handle to its next; 1 is no gap at all."""
    steps = [batch.step for batch in cell.batches if any(row.handle == handle for row in batch.rows)]
    return [later - earlier for earlier, later in itertools.pairwise(steps)]


@pytest.mark.parametrize("policy", sorted(BUILT_IN))
@pytest.mark.parametrize("spec", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("share", [0.0, 0.2])
def test_c11_a_victim_has_a_row_in_every_step_while_fifty_long_prompts_come(
    policy: str, spec: ExecutorSpec, depth: int, share: float
) -> None:
    """It decodes in each single step, with no longer a step than the budget, and is never preempted for them."""
    cell = make_cell(spec, depth=depth, policy=load_policy(policy), reserve=ReserveSettings(share, longest_prompt=10))
    victim = make_record(1, prompt=[1] * 3, max_tokens=80, incarnation="victim")
    cell.submit(victim)
    for _ in range(2 + depth):
        cell.round()
    for counter in range(2, 52):
        cell.submit(make_record(counter, prompt=[counter % 50] * (60 + counter), max_tokens=4))
    # A short one now and then, so that the reserve is in use.
    for counter in range(100, 110):
        cell.round()
        cell.now += 0.1
        cell.submit(make_record(counter, prompt=[counter % 50] * 5, max_tokens=4))
    while victim.id not in cell.gateway.done:
        cell.round()
        cell.now += 0.1
    assert set(gaps(cell, 1)) == {1}
    assert len(cell.gateway.tokens[victim.id, 0]) == 80
    assert max(batch.num_tokens for batch in cell.batches) <= 32
    # The attack went on to the end of it.
    assert cell.engine.load().num_requests > 0


def test_c11_the_bound_holds_for_every_sequence_that_decodes() -> None:
    """With as many sequences as the budget has tokens, each has a row in every step from its first token on."""
    spec = make_spec(num_blocks=2000, max_num_seqs=64, max_num_batched_tokens=8, max_model_len=1000)
    cell = make_cell(spec)
    for counter in range(1, 9):
        cell.submit(make_record(counter, prompt=[counter] * 5, max_tokens=200))
    for _ in range(12):
        cell.round()
    for counter in range(9, 59):
        cell.submit(make_record(counter, prompt=[counter % 50] * 400, max_tokens=1))
    for _ in range(100):
        cell.round()
    decoding = {row.handle for row in cell.batches[30].rows}
    assert decoding == set(range(1, 9))
    for batch in cell.batches[30:]:
        assert {row.handle for row in batch.rows} == decoding
