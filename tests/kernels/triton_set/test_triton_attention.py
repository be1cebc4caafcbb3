"""Paged attention by Triton, interpreted: the reference's results over odd shapes; nobody reads what is not theirs."""

from __future__ import annotations

import pytest
import torch
from attention_problem import Problem, Row
from hypothesis import given
from hypothesis import strategies as st
from test_paged_attention import (
    BATCHES,
    test_a_row_with_nan_harms_no_other,
    test_nothing_is_changed,
    test_one_plan_serves_every_layer,
)
from torch import Tensor

from executor_svc.kernels import KernelSet
from executor_svc.kernels.paged_attention import PlanAttention, reference

__all__ = ["test_a_row_with_nan_harms_no_other", "test_nothing_is_changed", "test_one_plan_serves_every_layer"]

TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
    torch.float16: {"rtol": 3e-3, "atol": 3e-3},
}
NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in TOLERANCES}
each_dtype = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=list(NAMES.values()))


def _attend(problem: Problem, plan_attention: PlanAttention, window: int, soft_cap: float) -> Tensor:
    with torch.inference_mode():
        attend = plan_attention(problem.metadata, problem.block_size)
        tensors = problem.query, problem.key_cache, problem.value_cache
        return attend(*tensors, problem.scale, window=window, soft_cap=soft_cap)


def _check(kernels: KernelSet, problem: Problem, window: int = 0, soft_cap: float = 0.0) -> None:
    expected = _attend(problem, reference.plan_attention, window, soft_cap)
    actual = _attend(problem, kernels.plan_attention, window, soft_cap)
    assert actual.dtype == expected.dtype
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, expected, **TOLERANCES[expected.dtype])


@each_dtype
@pytest.mark.parametrize("batch", list(BATCHES))
def test_batches_equal_the_reference(kernels: KernelSet, batch: str, dtype: torch.dtype) -> None:
    """Every kind of ragged batch, contexts in parts among them, though all memory around it is NaN."""
    _check(kernels, Problem(BATCHES[batch], heads=(6, 2), head_dim=16, dtype=dtype))


ODD: list[Row] = [(1, 5), (17, 17), (1, 300), (8, 40), (33, 64)]


@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size"),
    [((1, 1), 7, 16), ((9, 3), 33, 1), ((8, 1), 80, 3), ((4, 4), 64, 32), ((40, 2), 128, 16), ((35, 1), 10, 5)],
)
def test_shapes_equal_the_reference(kernels: KernelSet, heads: tuple[int, int], head_dim: int, block_size: int) -> None:
    """Any number of heads to a KV head, any width and any block size, none of them powers of two where that matters."""
    _check(kernels, Problem(ODD, heads=heads, head_dim=head_dim, block_size=block_size))


@pytest.mark.parametrize("window", [1, 16, 17, 100, 5000])
@pytest.mark.parametrize("soft_cap", [0.0, 1.5])
def test_windows_and_caps_equal_the_reference(kernels: KernelSet, window: int, soft_cap: float) -> None:
    """A window sees just its tokens, and a cap bends scores before the softmax, over several parts too."""
    _check(kernels, Problem([(1, 700), (40, 400), (7, 7)], heads=(6, 2), head_dim=16), window, soft_cap)


def test_blocks_that_every_window_has_passed_may_be_anything(kernels: KernelSet) -> None:
    """Before the window the table may hold the null block, and slots NaN: the outputs keep their bits."""
    rows = [(1, 700), (40, 400)]
    problem = Problem(rows, heads=(6, 2), head_dim=16)
    window = 33
    expected = _attend(problem, kernels.plan_attention, window, 0.0)
    for row, (query_len, context_len) in enumerate(rows):
        passed = (context_len - query_len + 1 - window) // 16
        blocks = problem.metadata.block_tables[row, :passed].clone()
        problem.key_cache[blocks] = problem.value_cache[blocks] = torch.nan
        # The tokens of the window's first block that lie before it, too.
        block = problem.metadata.block_tables[row, passed]
        unseen = (context_len - query_len + 1 - window) % 16
        problem.key_cache[block, :unseen] = problem.value_cache[block, :unseen] = torch.nan
        problem.metadata.block_tables[row, :passed] = 0
    assert torch.equal(_attend(problem, kernels.plan_attention, window, 0.0), expected)


def test_large_scores_equal_the_reference(kernels: KernelSet) -> None:
    """Scores far from zero neither overflow nor lose the softmax, also where parts of a context are merged."""
    for factor in (-3000.0, 3000.0):
        problem = Problem([(1, 700), (5, 70)], head_dim=8)
        problem.key_cache[..., 0] += factor
        expected = problem.run(reference.plan_attention)
        torch.testing.assert_close(problem.run(kernels.plan_attention), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_query_head_comes_out_as_nan(kernels: KernelSet, bad: float) -> None:
    """A query head that is not finite gives NaN, in one part and in several, and touches no other head or token."""
    problem = Problem([(9, 100), (1, 700)], heads=(9, 3), head_dim=16)
    sound = problem.run(kernels.plan_attention)
    spoilt = problem.query.clone()
    for token, head in ((0, 0), (4, 5), (9, 7)):
        spoilt[token, head, 3] = bad
    problem.query = spoilt
    out = problem.run(kernels.plan_attention).clone()
    for token, head in ((0, 0), (4, 5), (9, 7)):
        assert out[token, head].isnan().all()
        out[token, head] = sound[token, head]
    assert torch.equal(out, sound)


@pytest.mark.full
@pytest.mark.timeout(1800)
@given(
    rows=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 400)), min_size=1, max_size=4),
    decodes=st.lists(st.integers(1, 900), max_size=4),
    heads=st.sampled_from([(1, 1), (3, 1), (6, 2), (17, 1)]),
    head_dim=st.sampled_from([5, 16, 40]),
    block_size=st.sampled_from([1, 7, 16]),
    window=st.sampled_from([0, 1, 31, 300]),
    dtype=st.sampled_from(list(TOLERANCES)),
)
def test_any_batch_equals_the_reference(
    kernels: KernelSet,
    rows: list[Row],
    decodes: list[int],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    window: int,
    dtype: torch.dtype,
) -> None:
    """Whatever comes together, each row gets what the reference gives it."""
    batch = [(query, query + before) for query, before in rows] + [(1, context) for context in decodes]
    problem = Problem(batch, heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
    _check(kernels, problem, window)
