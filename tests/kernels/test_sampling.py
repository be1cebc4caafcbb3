"""Sampling: every filter by hand, its edges, its distribution, and the sets against each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor_svc.kernels import KernelSet
from executor_svc.kernels.noise.reference import uniform_numbers as philox_uniform
from executor_svc.kernels.sampling import SampleTokens, reference


@pytest.fixture
def sample(any_set: KernelSet) -> SampleTokens:
    """The op of every set."""
    return any_set.sample_tokens


def _parameters(
    num_rows: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
    uniform: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    return {
        "temperature": torch.full((num_rows,), temperature),
        "top_k": torch.full((num_rows,), top_k, dtype=torch.int64),
        "top_p": torch.full((num_rows,), top_p),
        "min_p": torch.full((num_rows,), min_p),
        "typical_p": torch.full((num_rows,), typical_p),
        "uniform": torch.linspace(0, 1, num_rows + 1, dtype=torch.float64)[:-1] if uniform is None else uniform,
    }


def _support(sample: SampleTokens, logits: list[float], **parameters: Any) -> set[int]:
    """Tokens that 200 evenly spread draws reach."""
    rows = torch.tensor(logits).repeat(200, 1)
    return set(sample(rows, **_parameters(200, **parameters)).tolist())


def test_greedy_takes_the_first_of_the_highest(sample: SampleTokens) -> None:
    """Below 1e-5 the highest logit wins, among equals the lowest id, and the filters and the noise have no effect."""
    logits = torch.full((2, 700), -1.0)
    logits[0, [300, 301, 650]] = 5.0
    logits[1, [699]] = 5.0
    parameters = _parameters(
        2, temperature=9.9e-6, top_k=3, top_p=0.1, typical_p=0.1, uniform=torch.full((2,), 0.999, dtype=torch.float64)
    )
    assert sample(logits, **parameters).tolist() == [300, 699]


def test_draw_inverts_the_distribution_in_id_order(sample: SampleTokens) -> None:
    """With weights 1/4, 0, 1/2, 1/4 the draw steps at 0.25 and 0.75, each step belonging to the token above it."""
    logits = torch.tensor([0.25, 0.0, 0.5, 0.25]).log().repeat(7, 1)
    uniform = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 0.9999, 1 - 2**-53], dtype=torch.float64)
    assert sample(logits, **_parameters(7, uniform=uniform)).tolist() == [0, 0, 2, 2, 3, 3, 3]


def test_top_k_keeps_exactly_k(sample: SampleTokens) -> None:
    """top_k keeps k tokens, of equal logits those with the lowest ids; 0 and a k past the vocabulary keep all."""
    logits = [1.0, 3.0, 2.0, 2.0, 2.0]
    assert _support(sample, logits, top_k=1) == {1}
    assert _support(sample, logits, top_k=3) == {1, 2, 3}
    assert _support(sample, logits, top_k=0) == _support(sample, logits, top_k=99) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_smallest_set(sample: SampleTokens) -> None:
    """Of probabilities 1/2, 1/4, 1/8, 1/8: 0.5 keeps one token, a little more keeps two, 0.76 three, 1 all."""
    logits = torch.tensor([0.125, 0.25, 0.5, 0.125]).log().tolist()
    assert _support(sample, logits, top_p=1e-9) == {2}
    assert _support(sample, logits, top_p=0.5) == {2}
    assert _support(sample, logits, top_p=0.51) == {1, 2}
    assert _support(sample, logits, top_p=0.76) == {0, 1, 2}
    assert _support(sample, logits, top_p=1.0) == {0, 1, 2, 3}


def test_top_p_counts_what_top_k_left(sample: SampleTokens) -> None:
    """top_p is a share of the mass that top_k kept: with 1/2 and 1/4 left, 0.6 of it needs one token, 0.7 two."""
    logits = torch.tensor([0.125, 0.25, 0.5, 0.125]).log().tolist()
    assert _support(sample, logits, top_k=2, top_p=0.6) == {2}
    assert _support(sample, logits, top_k=2, top_p=0.7) == {1, 2}


def test_min_p_is_relative_to_the_likeliest(sample: SampleTokens) -> None:
    """Of probabilities 1/2, 1/4, 1/8, 1/8: min_p 0.5 keeps two, just above it one, 1 keeps the likeliest."""
    logits = torch.tensor([0.125, 0.25, 0.5, 0.125]).log().tolist()
    assert _support(sample, logits, min_p=0.49) == {1, 2}
    assert _support(sample, logits, min_p=0.51) == {2}
    assert _support(sample, logits, min_p=1.0) == {2}
    assert _support(sample, logits, min_p=0.49, top_k=3, top_p=0.99) == {1, 2}


def test_masked_tokens_are_never_drawn(sample: SampleTokens) -> None:
    """A logit of negative infinity has weight 0, even where top_k asks for more tokens than are left."""
    logits = [float("-inf"), 1.0, float("-inf"), 1.0, float("-inf")]
    for parameters in (
        {},
        {"top_k": 4},
        {"top_p": 0.999},
        {"min_p": 0.1},
        {"temperature": 1e-12},
        {"typical_p": 0.999},
        {"typical_p": 0.999, "top_k": 4},
    ):
        assert _support(sample, logits, **parameters) <= {1, 3}


@pytest.mark.parametrize("exponent", range(-12, 0))
@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 50, "top_p": 0.9}, {"min_p": 0.05}, {"typical_p": 0.9}, {"top_k": 50, "typical_p": 0.9}],
    ids=["plain", "ranked", "min_p", "typical", "ranked typical"],
)
def test_small_temperatures(sample: SampleTokens, exponent: int, filters: dict[str, float]) -> None:
    """From 1e-12 to 1e-1 no weight is NaN: with one logit far ahead every temperature gives the greedy token (E5)."""
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(2)) * 100
    best = torch.tensor([0, 17, 255, 299])
    logits[torch.arange(4), best] = 1e4
    parameters = _parameters(4, temperature=10.0**exponent, **filters)  # type: ignore[arg-type]
    assert torch.equal(sample(logits, **parameters), best)


def test_draws_follow_the_distribution(sample: SampleTokens) -> None:
    """Over 4,000 Philox draws at temperature 2 each token's share is softmax(logits / 2) within five sigma."""
    count, logits = 4000, torch.tensor([0.0, 1.0, 2.0, 3.0, -1.0])
    noise = philox_uniform(np.full(count, 9, dtype=np.uint64), np.zeros(count, dtype=np.int64), np.arange(count))
    drawn = sample(logits.repeat(count, 1), **_parameters(count, temperature=2.0, uniform=torch.from_numpy(noise)))
    shares = torch.bincount(drawn, minlength=5) / count
    expected = torch.softmax(logits / 2, dim=-1)
    assert bool(((shares - expected).abs() < 5 * (expected * (1 - expected) / count).sqrt()).all())


def test_inputs_are_left_alone(sample: SampleTokens) -> None:
    """Sampling changes neither logits nor parameters."""
    logits = torch.randn(6, 90)
    parameters = _parameters(6, top_k=5, top_p=0.9, min_p=0.01, typical_p=0.9)
    parameters["top_k"][3:], parameters["top_p"][3:] = 0, 1
    parameters["temperature"][::2] = 0
    before = [logits.clone(), *(value.clone() for value in parameters.values())]
    sample(logits, **parameters)
    after = [logits, *parameters.values()]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def _random_batch(
    vocab: int, num_rows: int, seed: int, rounding: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Rows of every kind at once; logits rounded to multiples of `rounding`, so that many are equal, or not (0)."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(num_rows, vocab)) * rng.choice([0.05, 1, 8], size=(num_rows, 1))).float()
    if rounding:
        logits = (logits / rounding).round() * rounding
    logits[:, rng.integers(vocab)] = 0.5
    logits[0, rng.integers(vocab, size=vocab // 3)] = float("-inf")
    parameters = {
        "temperature": torch.from_numpy(rng.choice([0.0, 1e-12, 1e-5, 1e-4, 0.7, 1, 2], size=num_rows)).float(),
        "top_k": torch.from_numpy(rng.choice([0, 0, 1, 2, 50, 64, 65, 1024, vocab - 1, vocab, 1 << 31], size=num_rows)),
        "top_p": torch.from_numpy(rng.choice([1e-6, 0.3, 0.9, 0.999, 1, 1], size=num_rows)).float(),
        "min_p": torch.from_numpy(rng.choice([0, 0, 0.05, 1], size=num_rows)).float(),
        "typical_p": torch.from_numpy(rng.choice([1e-6, 0.2, 0.9, 1 - 2**-24, 1, 1], size=num_rows)).float(),
        "uniform": torch.from_numpy(rng.choice([0.0, 1 - 2**-53, *rng.random(4)], size=num_rows)),
    }
    parameters["top_k"].clamp_(min=0)
    logits[0, 0] = 0.25
    return logits, parameters


@given(
    vocab=st.sampled_from([1, 2, 7, 8, 9, 15, 16, 17, 64, 65, 255, 256, 257, 511, 513, 1200, 3001]),
    num_rows=st.integers(1, 9),
    seed=st.integers(0, 10_000),
    rounding=st.sampled_from([0.0, 0.25, 4.0]),
)
def test_compiled_equals_reference(compiled: KernelSet, vocab: int, num_rows: int, seed: int, rounding: float) -> None:
    """Batches of mixed rows, with and without equal logits, draw the very same tokens in every set."""
    logits, parameters = _random_batch(vocab, num_rows, seed, rounding)
    assert torch.equal(compiled.sample_tokens(logits, **parameters), reference.sample_tokens(logits, **parameters))


@pytest.mark.parametrize("vocab", [49152, 50257])
@pytest.mark.parametrize("rounding", [0.0, 0.0625])
def test_a_whole_vocabulary_equals_reference(compiled: KernelSet, vocab: int, rounding: float) -> None:
    """Over vocabularies of models, rounded as a bfloat16 head rounds them or not, the tokens are the reference's."""
    logits, parameters = _random_batch(vocab, 24, vocab, rounding)
    assert torch.equal(compiled.sample_tokens(logits, **parameters), reference.sample_tokens(logits, **parameters))


@pytest.mark.parametrize("vocab", [1, 9, 300, 5000])
@pytest.mark.parametrize("value", [-3e38, -1.0, -0.0, 3e38])
def test_constant_logits(compiled: KernelSet, vocab: int, value: float) -> None:
    """Where all logits are equal, top_k and top_p keep the lowest ids: k of them, and a share of the vocabulary."""
    logits = torch.full((3, vocab), value)
    uniform = torch.full((3,), 1 - 2**-53, dtype=torch.float64)
    parameters = _parameters(3, uniform=uniform)
    parameters["top_k"][0] = 5
    parameters["top_p"][1] = 0.5
    expected = [min(5, vocab) - 1, -(-vocab // 2) - 1, vocab - 1]
    assert compiled.sample_tokens(logits, **parameters).tolist() == expected


def test_zeros_of_either_sign_are_equal(compiled: KernelSet) -> None:
    """0 and -0 are one logit: the lowest id among them comes first."""
    logits = torch.tensor([-1.0, -0.0, 0.0, -0.0, 0.0]).repeat(3, 1)
    parameters = _parameters(3, uniform=torch.full((3,), 0.999, dtype=torch.float64))
    parameters["temperature"][0] = 0
    parameters["top_k"][1] = 2
    parameters["top_p"][2] = 0.6
    assert compiled.sample_tokens(logits, **parameters).tolist() == [1, 2, 3]


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 20}, {"typical_p": 0.9}, {"temperature": 0.0}])
def test_rows_of_nan_give_a_token(compiled: KernelSet, filters: dict[str, Any]) -> None:
    """NaN is not in the contract, but it ends in some token of the vocabulary, not in memory that is not the row's."""
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(1))
    logits[0], logits[1, ::3], logits[2] = torch.nan, torch.nan, float("-inf")
    tokens = compiled.sample_tokens(logits, **_parameters(4, **filters))
    assert bool(((tokens >= 0) & (tokens < 1000)).all())


@given(seed=st.integers(0, 10_000), rounding=st.sampled_from([0.0, 0.25]))
def test_a_row_does_not_depend_on_its_batch(compiled: KernelSet, seed: int, rounding: float) -> None:
    """Every row draws alone what it draws among the others, shared among threads or not."""
    logits, parameters = _random_batch(9000, 16, seed, rounding)
    together = compiled.sample_tokens(logits, **parameters)
    alone = [
        compiled.sample_tokens(
            logits[row : row + 1], **{name: value[row : row + 1] for name, value in parameters.items()}
        )
        for row in range(16)
    ]
    assert torch.equal(together, torch.cat(alone))


@given(vocab=st.integers(1, 3000), num_rows=st.integers(1, 4), seed=st.integers(0, 1000))
def test_greedy_is_the_first_maximum(compiled: KernelSet, vocab: int, num_rows: int, seed: int) -> None:
    """At every length the token is that of numpy's argmax, which is the first of equals."""
    logits = np.random.default_rng(seed).integers(0, 4, size=(num_rows, vocab)).astype(np.float32)
    tokens = compiled.sample_tokens(torch.from_numpy(logits), **_parameters(num_rows, temperature=0.0))
    assert tokens.tolist() == logits.argmax(axis=1).tolist()


def test_a_vocabulary_past_the_sums_is_refused(compiled: KernelSet) -> None:
    """Sums of more weights than an int64 holds would wrap: the op says so."""
    with pytest.raises(ValueError, match="sampling takes fewer than 524288"):
        compiled.sample_tokens(torch.zeros(1, 1 << 19), **_parameters(1))
