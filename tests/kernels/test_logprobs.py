"""Logprobs: the arithmetic, the order of the likeliest, and the sets against each other."""

from __future__ import annotations

import pytest
import torch

from executor_svc.kernels import KernelSet
from executor_svc.kernels.logprobs import GatherLogprobs, reference


@pytest.fixture
def gather(any_set: KernelSet) -> GatherLogprobs:
    """The op of every set."""
    return any_set.gather_logprobs


def test_by_hand(gather: GatherLogprobs) -> None:
    """Probabilities 1/2, 1/4, 1/8, 1/8 come out as their logarithms, likeliest first, equals by id."""
    probabilities = torch.tensor([[0.125, 0.5, 0.125, 0.25]])
    sampled, ids, top = gather(probabilities.log() + 3, torch.tensor([2]), 4)
    assert ids.tolist() == [[1, 3, 0, 2]]
    torch.testing.assert_close(sampled, torch.tensor([0.125]).log())
    torch.testing.assert_close(top, torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log())


def test_no_alternatives(gather: GatherLogprobs) -> None:
    """num_top 0 gives the sampled tokens' logprobs and empty [N, 0] columns."""
    sampled, ids, top = gather(torch.zeros(2, 8), torch.tensor([0, 7]), 0)
    torch.testing.assert_close(sampled, torch.full((2,), 1 / 8).log())
    assert (ids.shape, ids.dtype, top.shape, top.dtype) == ((2, 0), torch.int64, (2, 0), torch.float32)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_extreme_logits_stay_finite(gather: GatherLogprobs, scale: float) -> None:
    """Flat and very peaked rows give finite logprobs, at most 0; the sampled token's equals its top entry."""
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(1)) * scale
    sampled, ids, top = gather(logits, logits.argmax(dim=-1), 5)
    assert torch.isfinite(top).all()
    assert bool((top <= 1e-6).all())
    assert torch.equal(sampled, top[:, 0])
    assert torch.equal(ids[:, 0], logits.argmax(dim=-1))


@pytest.mark.parametrize("num_top", [0, 1, 20, None], ids=["none", "one", "some", "all"])
@pytest.mark.parametrize("vocab", [20, 63, 1021, 5000])
@pytest.mark.parametrize("step", [0.0, 1.0, 1e9], ids=["distinct", "tied", "constant"])
def test_compiled_equals_reference(compiled: KernelSet, num_top: int | None, vocab: int, step: float) -> None:
    """The ids are equal even where many logits are, as after a bfloat16 head; the logprobs agree to 1e-5."""
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    if step:
        logits = (logits / step).round() * step
    token_ids, count = torch.arange(5), vocab if num_top is None else num_top
    expected = reference.gather_logprobs(logits, token_ids, count)
    result = compiled.gather_logprobs(logits, token_ids, count)
    assert torch.equal(result[1], expected[1])
    torch.testing.assert_close(result[0], expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(result[2], expected[2], rtol=0, atol=1e-5)


def test_rows_do_not_depend_on_one_another(compiled: KernelSet) -> None:
    """A row alone gives bit for bit what it gives among others."""
    logits = torch.randn(7, 20_001, generator=torch.Generator().manual_seed(3))
    token_ids = torch.arange(7)
    together = compiled.gather_logprobs(logits, token_ids, 9)
    for row in range(7):
        alone = compiled.gather_logprobs(logits[row : row + 1], token_ids[row : row + 1], 9)
        assert all(torch.equal(mine[row : row + 1], each) for mine, each in zip(together, alone, strict=True))
