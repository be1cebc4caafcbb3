"""typical_p: by hand, against transformers' own, and at its edges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from processed import expected_token
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from executor_svc.kernels import KernelSet
from executor_svc.kernels.sampling import SampleTokens

DRAWS = 60


@pytest.fixture
def sample(any_set: KernelSet) -> SampleTokens:
    """The op of every set."""
    return any_set.sample_tokens


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads, and on a busy machine each parallel loop waits for its slowest."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _draws(sample: SampleTokens, logits: torch.Tensor, **filters: Any) -> list[int]:
    """What evenly spread draws from one row give."""
    values = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, **filters}
    tokens = sample(
        logits.repeat(DRAWS, 1),
        **{name: torch.full((DRAWS,), value) for name, value in values.items() if name != "top_k"},
        top_k=torch.full((DRAWS,), filters.get("top_k", 0)),
        uniform=(torch.arange(DRAWS, dtype=torch.float64) + 0.5) / DRAWS,
    )
    return tokens.tolist()


def _expected(logits: torch.Tensor, **filters: Any) -> list[int | None]:
    """The same by transformers' warpers, in float64; None where rounding decides."""
    chain = LogitsProcessorList([TemperatureLogitsWarper(filters.get("temperature", 1.0))])
    if "top_k" in filters:
        chain.append(TopKLogitsWarper(filters["top_k"]))
    if "top_p" in filters:
        chain.append(TopPLogitsWarper(filters["top_p"]))
    if "min_p" in filters:
        chain.append(MinPLogitsWarper(filters["min_p"]))
    chain.append(TypicalLogitsWarper(filters["typical_p"]))
    probabilities = torch.softmax(chain(torch.zeros(1, 1), logits[None].double())[0], dim=-1)
    return [expected_token(probabilities, (draw + 0.5) / DRAWS) for draw in range(DRAWS)]


def _assert_as_expected(sample: SampleTokens, logits: torch.Tensor, **filters: Any) -> None:
    drawn, expected = _draws(sample, logits, **filters), _expected(logits, **filters)
    assert sum(token is None for token in expected) < DRAWS / 4
    assert drawn == [mine if token is None else token for mine, token in zip(drawn, expected, strict=True)]


def test_nearest_to_the_expected_surprise_come_first(sample: SampleTokens) -> None:
    """Of probabilities 1/2, 1/4, 1/8, 1/16, 1/16 the mean surprise is 15/8 bits: 1/4 is nearest, then 1/2, though it is
    the likeliest, then 1/8, then the two of 1/16 together.
    """
    logits = torch.tensor([0.0625, 0.5, 0.25, 0.0625, 0.125]).log()
    expected = {1e-9: {2}, 0.24: {2}, 0.26: {1, 2}, 0.74: {1, 2}, 0.76: {1, 2, 4}, 0.87: {1, 2, 4}, 0.88: set(range(5))}
    assert {share: set(_draws(sample, logits, typical_p=share)) for share in expected} == expected


def test_the_kept_are_renormalized(sample: SampleTokens) -> None:
    """The kept tokens, 1/2 and 1/4, are drawn two to one, in the order of their ids."""
    drawn = _draws(sample, torch.tensor([0.0625, 0.5, 0.25, 0.0625, 0.125]).log(), typical_p=0.5)
    assert drawn == [1 if (draw + 0.5) / DRAWS < 2 / 3 else 2 for draw in range(DRAWS)]


@pytest.mark.parametrize("share", [1e-6, 0.1, 0.5, 0.9, 1 - 2**-24])
def test_equal_logits_stay_together(sample: SampleTokens, share: float) -> None:
    """Where all logits are equal all are as near as can be, and all are kept."""
    assert set(_draws(sample, torch.full((40,), 3.5), typical_p=share)) == set(range(40))


@pytest.mark.parametrize("vocab", [1, 2, 3, 65, 300])
@pytest.mark.parametrize("scale", [0.0, 1e-6, 1.0, 1e4, 3e38])
def test_a_token_is_left_whatever_the_logits(sample: SampleTokens, vocab: int, scale: float) -> None:
    """The smallest share keeps a token of the vocabulary that is not masked, at logits of any size."""
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)).clamp(-1, 1) * scale
    if vocab > 2:
        logits[::2] = float("-inf")
    for share, temperature in ((1e-30, 1.0), (0.5, 1e-5), (1 - 2**-24, 2.0)):
        drawn = set(_draws(sample, logits, typical_p=share, temperature=temperature))
        assert all(logits[token].isfinite() for token in drawn)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.2, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("vocab", [5, 65, 1200])
def test_as_in_transformers(sample: SampleTokens, share: float, scale: float, vocab: int) -> None:
    """Flat, ordinary and peaked rows of a tiny and a larger vocabulary, some tokens masked, draw what
    TypicalLogitsWarper's distribution gives, whether a short list settles them or not.
    """
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(vocab, generator=generator) * scale
    logits[torch.randperm(vocab, generator=generator)[: vocab // 5]] = float("-inf")
    _assert_as_expected(sample, logits, typical_p=share)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_ties_as_in_transformers(sample: SampleTokens, share: float) -> None:
    """Rows of few distinct logits: equals are kept or dropped together, as there."""
    for seed in range(4):
        logits = torch.randint(-4, 4, (300,), generator=torch.Generator().manual_seed(seed)) * 0.7
        _assert_as_expected(sample, logits, typical_p=share)


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 10},
        {"top_k": 300},
        {"top_p": 0.8},
        {"top_p": 0.999},
        {"min_p": 0.05},
        {"temperature": 2.0, "min_p": 0.05, "typical_p": 0.97},
        {"temperature": 2.0, "min_p": 0.05, "top_k": 500, "typical_p": 0.97},
        {"temperature": 0.6},
        {"temperature": 2.0, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 2.0, "top_k": 500, "top_p": 0.95, "min_p": 0.001},
    ],
)
def test_after_the_other_filters(sample: SampleTokens, filters: dict[str, float]) -> None:
    """typical_p looks at the distribution that temperature, top_k, top_p and min_p left, renormalized."""
    for seed in range(2):
        logits = torch.randn(1000, generator=torch.Generator().manual_seed(seed)) * 2.5
        _assert_as_expected(sample, logits, **{"typical_p": 0.7, **filters})
