"""Logprobs: the arithmetic, the order of the likeliest, and the sets against each other."""

from __future__ import annotations

import pytest
import torch

from executor_svc.kernels.logprobs import GatherLogprobs, cpu, reference

SETS = pytest.mark.parametrize("gather", [reference.gather_logprobs, cpu.gather_logprobs], ids=["reference", "cpu"])


@SETS
def test_by_hand(gather: GatherLogprobs) -> None:
    """Probabilities 1/2, 1/4, 1/8, 1/8 come out as their logarithms, likeliest first, equals by id."""
    probabilities = torch.tensor([[0.125, 0.5, 0.125, 0.25]])
    sampled, ids, top = gather(probabilities.log() + 3, torch.tensor([2]), 4)
    assert ids.tolist() == [[1, 3, 0, 2]]
    torch.testing.assert_close(sampled, torch.tensor([0.125]).log())
    torch.testing.assert_close(top, torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log())


@SETS
def test_no_alternatives(gather: GatherLogprobs) -> None:
    """num_top 0 gives the sampled tokens' logprobs and empty [N, 0] columns."""
    sampled, ids, top = gather(torch.zeros(2, 8), torch.tensor([0, 7]), 0)
    torch.testing.assert_close(sampled, torch.full((2,), 1 / 8).log())
    assert (ids.shape, ids.dtype, top.shape, top.dtype) == ((2, 0), torch.int64, (2, 0), torch.float32)


@SETS
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_extreme_logits_stay_finite(gather: GatherLogprobs, scale: float) -> None:
    """Flat and very peaked rows give finite logprobs, at most 0; the sampled token's equals its top entry."""
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(1)) * scale
    sampled, ids, top = gather(logits, logits.argmax(dim=-1), 5)
    assert torch.isfinite(top).all()
    assert bool((top <= 1e-6).all())
    assert torch.equal(sampled, top[:, 0])
    assert torch.equal(ids[:, 0], logits.argmax(dim=-1))


@pytest.mark.parametrize("num_top", [0, 1, 20])
@pytest.mark.parametrize("vocab", [20, 63, 1021])
@pytest.mark.parametrize("tied", [False, True], ids=["distinct", "tied"])
def test_cpu_equals_reference(num_top: int, vocab: int, tied: bool) -> None:
    """The ids are equal even where many logits are, as after a bfloat16 head; the logprobs agree to 1e-5."""
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    if tied:
        logits = logits.round()
    token_ids = torch.arange(5)
    expected = reference.gather_logprobs(logits, token_ids, num_top)
    result = cpu.gather_logprobs(logits, token_ids, num_top)
    assert torch.equal(result[1], expected[1])
    torch.testing.assert_close(result[0], expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(result[2], expected[2], rtol=0, atol=1e-5)
