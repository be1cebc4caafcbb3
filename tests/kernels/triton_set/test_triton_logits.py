"""What becomes of logits by Triton, interpreted: the very tokens and bits of the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_finite import (
    test_one_bad_number_anywhere_is_seen,
    test_rows_of_a_wider_tensor,
    test_the_largest_numbers_are_finite,
)
from test_logit_bias import test_compiled_equals_reference as test_logit_bias_equals_reference
from test_logit_bias import (
    test_forbidden_tokens_become_negative_infinity,
    test_logits_that_do_not_lie_together_are_refused,
    test_no_place,
    test_only_the_named_places_change,
    test_the_largest_bias_leaves_logits_finite,
)
from test_logprobs import gather as gather
from test_logprobs import (
    test_by_hand,
    test_extreme_logits_stay_finite,
    test_no_alternatives,
    test_rows_do_not_depend_on_one_another,
)
from test_penalties import (
    test_each_penalty_by_hand,
    test_nothing_seen,
    test_repetition_penalty_as_in_transformers,
    test_the_smallest_repetition_leaves_logits_finite,
)
from test_philox import test_every_set_gives_the_same_numbers
from test_sampling import (
    _random_batch,
    test_a_vocabulary_past_the_sums_is_refused,
    test_constant_logits,
    test_greedy_takes_the_first_of_the_highest,
    test_inputs_are_left_alone,
    test_rows_of_nan_give_a_token,
    test_zeros_of_either_sign_are_equal,
)
from test_sampling import sample as sample

from executor_svc.kernels import KernelSet
from executor_svc.kernels.logprobs import reference as logprobs
from executor_svc.kernels.penalties import reference as penalties
from executor_svc.kernels.sampling import reference as sampling

__all__ = [
    "gather",
    "sample",
    "test_a_vocabulary_past_the_sums_is_refused",
    "test_by_hand",
    "test_constant_logits",
    "test_each_penalty_by_hand",
    "test_every_set_gives_the_same_numbers",
    "test_extreme_logits_stay_finite",
    "test_forbidden_tokens_become_negative_infinity",
    "test_greedy_takes_the_first_of_the_highest",
    "test_inputs_are_left_alone",
    "test_logit_bias_equals_reference",
    "test_logits_that_do_not_lie_together_are_refused",
    "test_no_alternatives",
    "test_no_place",
    "test_nothing_seen",
    "test_one_bad_number_anywhere_is_seen",
    "test_only_the_named_places_change",
    "test_repetition_penalty_as_in_transformers",
    "test_rows_do_not_depend_on_one_another",
    "test_rows_of_a_wider_tensor",
    "test_rows_of_nan_give_a_token",
    "test_the_largest_bias_leaves_logits_finite",
    "test_the_largest_numbers_are_finite",
    "test_the_smallest_repetition_leaves_logits_finite",
    "test_zeros_of_either_sign_are_equal",
]


def _check(kernels: KernelSet, vocab: int, num_rows: int, seed: int, rounding: float) -> None:
    logits, parameters = _random_batch(vocab, num_rows, seed, rounding)
    expected = sampling.sample_tokens(logits, **parameters)
    assert kernels.sample_tokens(logits, **parameters).tolist() == expected.tolist()


@pytest.mark.parametrize("vocab", [1, 17, 257, 1200, 4097, 9001])
@pytest.mark.parametrize("rounding", [0.0, 0.25, 4.0])
def test_the_same_tokens_are_drawn(kernels: KernelSet, vocab: int, rounding: float) -> None:
    """Batches of mixed rows, with and without equal logits, in one chunk and several, draw the reference's tokens."""
    _check(kernels, vocab, 9, vocab, rounding)


@pytest.mark.parametrize("filters", [{"top_k": 20}, {"top_p": 0.9}, {"typical_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_limits_on_a_whole_vocabulary(kernels: KernelSet, filters: dict[str, Any]) -> None:
    """Over a vocabulary of a model, rounded as a bfloat16 head rounds it, each filter alone draws the same tokens."""
    logits = (torch.randn(2, 49_152, generator=torch.Generator().manual_seed(1)) * 3).bfloat16().float()
    off = {"temperature": 0.8, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0} | filters
    parameters = {name: torch.full((2,), value) for name, value in off.items()}
    parameters["top_k"] = torch.full((2,), filters.get("top_k", 0))
    parameters["uniform"] = torch.tensor([0.3, 1 - 2**-53], dtype=torch.float64)
    expected = sampling.sample_tokens(logits, **parameters)
    assert kernels.sample_tokens(logits, **parameters).tolist() == expected.tolist()


def test_a_row_draws_alone_what_it_draws_among_others(kernels: KernelSet) -> None:
    """The rows beside it change no token."""
    logits, parameters = _random_batch(700, 6, 3, 0.25)
    together = kernels.sample_tokens(logits, **parameters)
    for row in range(6):
        one = {name: value[row : row + 1] for name, value in parameters.items()}
        assert kernels.sample_tokens(logits[row : row + 1], **one).tolist() == [int(together[row])]


@pytest.mark.full
@pytest.mark.timeout(3600)
@given(
    vocab=st.sampled_from([1, 2, 7, 64, 255, 256, 257, 513, 1200, 3001, 5000]),
    num_rows=st.integers(1, 9),
    seed=st.integers(0, 10_000),
    rounding=st.sampled_from([0.0, 0.25, 4.0]),
)
def test_any_batch_draws_the_same_tokens(
    kernels: KernelSet, vocab: int, num_rows: int, seed: int, rounding: float
) -> None:
    """Further batches of mixed rows."""
    _check(kernels, vocab, num_rows, seed, rounding)


@pytest.mark.parametrize("num_top", [0, 1, 20, None], ids=["none", "one", "some", "all"])
@pytest.mark.parametrize(("vocab", "step"), [(20, 0.0), (1021, 1.0), (5000, 1.0), (5000, 1e9)])
def test_logprobs_equal_the_reference(kernels: KernelSet, num_top: int | None, vocab: int, step: float) -> None:
    """The ids are equal even where many logits are; the logprobs agree to 1e-5."""
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    if step:
        logits = (logits / step).round() * step
    token_ids, count = torch.arange(3), vocab if num_top is None else num_top
    expected = logprobs.gather_logprobs(logits, token_ids, count)
    result = kernels.gather_logprobs(logits, token_ids, count)
    assert torch.equal(result[1], expected[1])
    torch.testing.assert_close(result[0], expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(result[2], expected[2], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("num_rows", "vocab"), [(1, 1), (3, 63), (7, 3000)])
def test_penalties_equal_the_reference(kernels: KernelSet, num_rows: int, vocab: int) -> None:
    """On random logits (some masked), sequences and penalties of either sign, the bits are the reference's."""
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, vocab, generator=generator) * 4
    logits[0, 0] = float("-inf")
    lengths = torch.randint(0, 300, (num_rows, 2), generator=generator).sort(dim=1).values
    arguments = {
        "tokens": torch.randint(0, vocab, (num_rows + 2, 300), generator=generator, dtype=torch.int32),
        "slots": torch.arange(num_rows, 0, -1),
        "num_prompt_tokens": lengths[:, 0].contiguous(),
        "num_tokens": lengths[:, 1].contiguous(),
        "repetition": torch.rand(num_rows, generator=generator) * 1.9 + 0.1,
        "presence": torch.rand(num_rows, generator=generator) * 4 - 2,
        "frequency": torch.rand(num_rows, generator=generator) * 4 - 2,
    }
    arguments["repetition"][::3] = 1
    arguments["presence"][::2] = arguments["frequency"][::2] = 0
    expected = logits.clone()
    penalties.apply_penalties(expected, **arguments)
    kernels.apply_penalties(logits, **arguments)
    assert torch.equal(logits, expected)
