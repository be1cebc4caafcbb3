"""Logit bias and forbidden tokens: the arithmetic, transformers' own, and the sets against each other."""

from __future__ import annotations

import pytest
import torch
from transformers import SequenceBiasLogitsProcessor

from executor_svc.kernels import KernelSet
from executor_svc.kernels.logit_bias import reference


def _places(*rows: int) -> dict[str, torch.Tensor]:
    """Lists of these lengths, end to end."""
    ends = torch.tensor(rows).cumsum(0)
    return {"begins": ends - torch.tensor(rows), "ends": ends}


def test_only_the_named_places_change(any_set: KernelSet) -> None:
    """A value is added at its row and token; every other logit keeps its bits, a negative infinity too."""
    logits = torch.tensor([[1.0, 2.0, 3.0], [7.0, 8.0, 9.0], [1.0, float("-inf"), 3.0]])
    token_ids, values = torch.tensor([2, 0, 2]), torch.tensor([-4.0, 0.5, 100.0])
    any_set.add_logit_bias(logits, token_ids=token_ids, values=values, **_places(1, 0, 2))
    assert logits.tolist() == [[1.0, 2.0, -1.0], [7.0, 8.0, 9.0], [1.5, float("-inf"), 103.0]]


def test_forbidden_tokens_become_negative_infinity(any_set: KernelSet) -> None:
    """The tokens of each row's list, and no other logit, change."""
    logits = torch.arange(12.0).view(3, 4)
    any_set.forbid_tokens(logits, token_ids=torch.tensor([3, 0, 1, 1]), **_places(2, 0, 2))
    lowest = float("-inf")
    assert logits.tolist() == [[lowest, 1, 2, lowest], [4, 5, 6, 7], [8, lowest, 10, 11]]


@pytest.mark.parametrize("seed", range(5))
def test_as_in_transformers(any_set: KernelSet, seed: int) -> None:
    """Biases of single tokens give bit for bit what SequenceBiasLogitsProcessor gives; rows may share a list."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 97, generator=generator) * 10
    tokens = torch.randperm(97, generator=generator)[:40]
    values = torch.randn(40, generator=generator) * 30
    bias = [[[token], value] for token, value in zip(tokens.tolist(), values.tolist(), strict=True)]
    expected = SequenceBiasLogitsProcessor(bias)(torch.zeros(3, 1, dtype=torch.int64), logits.clone())
    shared = {"begins": torch.zeros(3, dtype=torch.int64), "ends": torch.full((3,), 40)}
    any_set.add_logit_bias(logits, token_ids=tokens, values=values, **shared)
    assert torch.equal(logits, expected)


def test_the_largest_bias_leaves_logits_finite(any_set: KernelSet) -> None:
    """Any finite bias is allowed: what it makes of a logit ends at the largest float and is never infinite."""
    largest = torch.finfo(torch.float32).max
    logits = torch.tensor([[largest / 2, -largest / 2, largest, -largest]])
    values = torch.tensor([largest, -largest, largest, largest])
    any_set.add_logit_bias(logits, token_ids=torch.arange(4), values=values, **_places(4))
    assert logits.tolist() == [[largest, -largest, largest, 0.0]]


def test_no_place(any_set: KernelSet) -> None:
    """Without places nothing changes."""
    logits = torch.randn(2, 5)
    before = logits.clone()
    none = torch.zeros(0, dtype=torch.int64)
    any_set.add_logit_bias(logits, token_ids=none, values=none.float(), **_places(0, 0))
    any_set.forbid_tokens(logits, token_ids=none, **_places(0, 0))
    assert torch.equal(logits, before)


@pytest.mark.parametrize(("num_rows", "vocab"), [(1, 1), (3, 63), (7, 257)])
def test_compiled_equals_reference(compiled: KernelSet, num_rows: int, vocab: int) -> None:
    """On random logits, some masked, random places and values of every size the sets agree bit for bit."""
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, vocab, generator=generator) * 4
    logits[0, 0] = float("-inf")
    chosen = torch.rand(num_rows, vocab, generator=generator) < 0.4
    _, token_ids = chosen.nonzero(as_tuple=True)
    scale = 10.0 ** torch.randint(-3, 38, (len(token_ids),), generator=generator)
    values = (torch.randn(len(token_ids), generator=generator) * scale).clamp(-3e38, 3e38)
    places = {"token_ids": token_ids, "values": values, **_places(*chosen.sum(dim=1).tolist())}
    by_reference, by_compiled = logits.clone(), logits.clone()
    reference.add_logit_bias(by_reference, **places)
    compiled.add_logit_bias(by_compiled, **places)
    assert torch.equal(by_reference, by_compiled)


def test_logits_that_do_not_lie_together_are_refused(compiled: KernelSet) -> None:
    """What is changed in place cannot be a copy."""
    logits = torch.zeros(2, 8)[:, ::2]
    none = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ValueError, match="contiguous"):
        compiled.add_logit_bias(logits, token_ids=none, values=none.float(), **_places(0, 0))
    with pytest.raises(ValueError, match="contiguous"):
        compiled.forbid_tokens(logits, token_ids=none, **_places(0, 0))
