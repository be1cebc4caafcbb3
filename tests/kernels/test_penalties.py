"""Penalties: the arithmetic, its place in transformers' terms, and the sets against each other."""

from __future__ import annotations

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from executor_svc.kernels.penalties import ApplyPenalties, cpu, reference

SETS = pytest.mark.parametrize("apply", [reference.apply_penalties, cpu.apply_penalties], ids=["reference", "cpu"])


def _columns(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


@SETS
def test_each_penalty_by_hand(apply: ApplyPenalties) -> None:
    """Repetition divides positive logits and multiplies others; presence counts once, frequency each time."""
    logits = torch.tensor([[2.0, -2.0, 0.0, 4.0], [2.0, -2.0, 1.0, 4.0], [1.0, 1.0, 1.0, 1.0]])
    apply(
        logits,
        rows=torch.tensor([0, 0, 0, 1, 1, 2]),
        token_ids=torch.tensor([0, 1, 2, 1, 3, 3]),
        output_counts=torch.tensor([0, 1, 2, 0, 3, 2], dtype=torch.int32),
        repetition=_columns(2.0, 1.0, 0.5),
        presence=_columns(0.5, 0.0, 0.25),
        frequency=_columns(0.0, 0.25, -1.0),
    )
    expected = [[1.0, -4.5, -0.5, 4.0], [2.0, -2.0, 1.0, 3.25], [1.0, 1.0, 1.0, 3.75]]
    assert logits.tolist() == expected


@SETS
def test_repetition_penalty_as_in_transformers(apply: ApplyPenalties) -> None:
    """With the distinct tokens of prompt and output as places, the result is bit-equal to transformers' own."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 97, generator=generator)
    history = torch.randint(0, 97, (3, 40), generator=generator)
    expected = RepetitionPenaltyLogitsProcessor(penalty=1.3)(history, logits.clone())
    places = [(row, token) for row in range(3) for token in history[row].unique().tolist()]
    apply(
        logits,
        rows=torch.tensor([row for row, _ in places]),
        token_ids=torch.tensor([token for _, token in places]),
        output_counts=torch.zeros(len(places), dtype=torch.int32),
        repetition=torch.full((3,), 1.3),
        presence=torch.zeros(3),
        frequency=torch.zeros(3),
    )
    assert torch.equal(logits, expected)


@SETS
@pytest.mark.parametrize("tiny", [1e-45, 1e-40, 1e-38])
def test_the_smallest_repetition_leaves_logits_finite(apply: ApplyPenalties, tiny: float) -> None:
    """Any repetition above 0 is allowed: what it makes of a logit ends at the largest float and is never infinite."""
    logits = torch.tensor([[30.0, -30.0, 0.0, 1.0]])
    apply(
        logits,
        rows=torch.tensor([0, 0, 0]),
        token_ids=torch.tensor([0, 1, 2]),
        output_counts=torch.ones(3, dtype=torch.int32),
        repetition=_columns(tiny),
        presence=_columns(-2.0),
        frequency=_columns(-2.0),
    )
    assert logits.isfinite().all()
    assert logits.argmax() == 0
    assert logits[0, 3] == 1.0


@SETS
def test_nothing_seen(apply: ApplyPenalties) -> None:
    """Without places nothing changes, however strong the penalties."""
    logits = torch.randn(2, 5)
    before = logits.clone()
    none = torch.zeros(0, dtype=torch.int64)
    strong = torch.full((2,), 2.0)
    apply(
        logits,
        rows=none,
        token_ids=none,
        output_counts=none.to(torch.int32),
        repetition=strong,
        presence=strong,
        frequency=strong,
    )
    assert torch.equal(logits, before)


@pytest.mark.parametrize(("num_rows", "vocab"), [(1, 1), (3, 63), (7, 257)])
def test_cpu_equals_reference(num_rows: int, vocab: int) -> None:
    """On random logits (some masked), places and penalties of either sign the two sets agree bit for bit."""
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, vocab, generator=generator) * 4
    logits[0, 0] = float("-inf")
    rows, token_ids = (torch.rand(num_rows, vocab, generator=generator) < 0.4).nonzero(as_tuple=True)
    arguments = {
        "rows": rows,
        "token_ids": token_ids,
        "output_counts": torch.randint(0, 4, (len(rows),), generator=generator, dtype=torch.int32),
        "repetition": torch.rand(num_rows, generator=generator) * 1.9 + 0.1,
        "presence": torch.rand(num_rows, generator=generator) * 4 - 2,
        "frequency": torch.rand(num_rows, generator=generator) * 4 - 2,
    }
    by_reference, by_cpu = logits.clone(), logits.clone()
    reference.apply_penalties(by_reference, **arguments)
    cpu.apply_penalties(by_cpu, **arguments)
    assert torch.equal(by_reference, by_cpu)
