"""Logit bias: the arithmetic, transformers' own, and the sets against each other."""

from __future__ import annotations

import pytest
import torch
from transformers import SequenceBiasLogitsProcessor

from executor_svc.kernels.logit_bias import AddLogitBias, cpu, reference

SETS = pytest.mark.parametrize("add", [reference.add_logit_bias, cpu.add_logit_bias], ids=["reference", "cpu"])


@SETS
def test_only_the_named_places_change(add: AddLogitBias) -> None:
    """A value is added at its row and token; every other logit keeps its bits, a negative infinity too."""
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, float("-inf"), 3.0]])
    add(
        logits,
        rows=torch.tensor([0, 1, 1]),
        token_ids=torch.tensor([2, 0, 2]),
        values=torch.tensor([-4.0, 0.5, 100.0]),
    )
    assert logits.tolist() == [[1.0, 2.0, -1.0], [1.5, float("-inf"), 103.0]]


@SETS
@pytest.mark.parametrize("seed", range(5))
def test_as_in_transformers(add: AddLogitBias, seed: int) -> None:
    """Biases of single tokens give bit for bit what SequenceBiasLogitsProcessor gives."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 97, generator=generator) * 10
    tokens = torch.randperm(97, generator=generator)[:40]
    values = torch.randn(40, generator=generator) * 30
    bias = [[[token], value] for token, value in zip(tokens.tolist(), values.tolist(), strict=True)]
    expected = SequenceBiasLogitsProcessor(bias)(torch.zeros(3, 1, dtype=torch.int64), logits.clone())
    add(logits, rows=torch.arange(3).repeat_interleave(40), token_ids=tokens.repeat(3), values=values.repeat(3))
    assert torch.equal(logits, expected)


@SETS
def test_the_largest_bias_leaves_logits_finite(add: AddLogitBias) -> None:
    """Any finite bias is allowed: what it makes of a logit ends at the largest float and is never infinite."""
    largest = torch.finfo(torch.float32).max
    logits = torch.tensor([[largest / 2, -largest / 2, largest, -largest]])
    values = torch.tensor([largest, -largest, largest, largest])
    add(logits, rows=torch.zeros(4, dtype=torch.int64), token_ids=torch.arange(4), values=values)
    assert logits.tolist() == [[largest, -largest, largest, 0.0]]


@SETS
def test_no_place(add: AddLogitBias) -> None:
    """Without places nothing changes."""
    logits = torch.randn(2, 5)
    before = logits.clone()
    none = torch.zeros(0, dtype=torch.int64)
    add(logits, rows=none, token_ids=none, values=none.float())
    assert torch.equal(logits, before)


@pytest.mark.parametrize(("num_rows", "vocab"), [(1, 1), (3, 63), (7, 257)])
def test_cpu_equals_reference(num_rows: int, vocab: int) -> None:
    """On random logits, some masked, random places and values of every size the two sets agree bit for bit."""
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, vocab, generator=generator) * 4
    logits[0, 0] = float("-inf")
    rows, token_ids = (torch.rand(num_rows, vocab, generator=generator) < 0.4).nonzero(as_tuple=True)
    scale = 10.0 ** torch.randint(-3, 38, (len(rows),), generator=generator)
    values = (torch.randn(len(rows), generator=generator) * scale).clamp(-3e38, 3e38)
    by_reference, by_cpu = logits.clone(), logits.clone()
    reference.add_logit_bias(by_reference, rows=rows, token_ids=token_ids, values=values)
    cpu.add_logit_bias(by_cpu, rows=rows, token_ids=token_ids, values=values)
    assert torch.equal(by_reference, by_cpu)
