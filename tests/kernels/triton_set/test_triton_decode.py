"""Attention of rows whose contexts the device alone knows: cut there as the host would, and with the same results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_problem import Problem, Row
from decode_cut import check_cut
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

pytest.importorskip("triton", reason="Triton has no build for this platform")

from executor_svc.kernels import KernelSet
from executor_svc.kernels.decode_plan.triton_impl import plan_decode
from executor_svc.kernels.paged_attention import reference


@settings(max_examples=20)
@given(
    context_lens=st.lists(st.integers(1, 5000), min_size=1, max_size=9),
    group=st.sampled_from([1, 3, 8, 16, 20, 71]),
    num_kv_heads=st.integers(1, 8),
    window=st.sampled_from([0, 1, 300, 100_000]),
    large_tile=st.sampled_from([16, 64]),
    processors=st.sampled_from([1, 4, 132]),
)
def test_the_device_cuts_as_the_host_does(
    context_lens: list[int], group: int, num_kv_heads: int, window: int, large_tile: int, processors: int
) -> None:
    """The same tiles and parts, whose partial results are the ones that are merged; what is left over names no line."""
    sizes = {"group": group, "num_kv_heads": num_kv_heads, "window": window, "large_tile": large_tile}
    check_cut(plan_decode, context_lens, processors, **sizes)


@pytest.mark.parametrize("rows", [65, 130])
def test_more_rows_than_a_form_of_the_kernel_takes(rows: int) -> None:
    """Rows of many programs, each of which works out the others' items by itself."""
    context_lens = [1 + row * 7919 % 3000 for row in range(rows)]
    check_cut(plan_decode, context_lens, 132, group=20, num_kv_heads=2, window=0, large_tile=16)


ROWS: list[Row] = [(1, 5), (1, 1), (1, 700), (1, 300), (1, 16)]


@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (100, 0.0), (0, 3.0)])
@pytest.mark.parametrize(("heads", "head_dim"), [((6, 2), 16), ((71, 1), 8), ((4, 4), 33)])
def test_results_are_those_of_known_contexts(
    triton_set: KernelSet, heads: tuple[int, int], head_dim: int, window: int, soft_cap: float
) -> None:
    """The reference's too, though tables are wider than any context and all memory around it is NaN."""
    problem = Problem(ROWS, heads=heads, head_dim=head_dim, dtype=torch.float32)
    with torch.inference_mode():
        tensors = problem.query, problem.key_cache, problem.value_cache
        plain = reference.plan_attention(problem.metadata, problem.block_size)
        expected = plain(*tensors, problem.scale, window=window, soft_cap=soft_cap)
        # Behind a sequence's blocks stand others', and the null block.
        tables = functional.pad(problem.metadata.block_tables, (0, 3), value=1)
        unknown = replace(problem.metadata, block_tables=tables, context_lens_host=None)
        for plan in (reference.plan_attention, triton_set.plan_attention):
            attend = plan(unknown, problem.block_size)
            actual = attend(*tensors, problem.scale, window=window, soft_cap=soft_cap)
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
            assert actual.is_contiguous()
