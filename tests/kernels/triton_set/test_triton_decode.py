"""Attention of rows whose contexts the device alone knows: cut there as the host would, and with the same results."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from attention_problem import Problem, Row
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from executor_svc.kernels import KernelSet
from executor_svc.kernels.paged_attention import reference
from executor_svc.kernels.paged_attention.work import plan_decode, plan_work


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
    batch = SimpleNamespace(query_lens=(1,) * len(context_lens), context_lens_host=tuple(context_lens))
    expected = plan_work(batch, **sizes, processors=processors)  # type: ignore[arg-type]
    work = plan_decode(torch.tensor(context_lens, dtype=torch.int32), **sizes, processors=processors)
    items = [item for item in work.items.tolist() if item[1] < group]
    rest = [item for item in work.items.tolist() if item[1] >= group]
    assert all(begin == end == 0 and partial == -1 for _, _, begin, end, partial in rest)
    # A group taller than the tile is cut by the host with its large tile, which is as tall.
    assert {each.tile for each in expected} == {work.tile}
    parts = {tuple(item[:4]): item[4] for each in expected for item in each.items.tolist()}
    assert {tuple(item[:4]) for item in items} == set(parts)
    assert len(items) == len(parts)
    assert all((parts[tuple(item[:4])] < 0) == (item[4] < 0) for item in items)
    merged = {(row, first): (at, count) for row, first, at, count in work.merges.tolist() if first < group}
    assert all(count == 0 for _, first, _, count in work.merges.tolist() if first >= group)
    for (row, first), (at, count) in merged.items():
        mine = sorted(item[2:] for item in items if (item[0], item[1]) == (row, first))
        assert [partial for _, _, partial in mine] == list(range(at, at + count))
    assert {(row, first) for row, first, _, _, partial in items if partial >= 0} == set(merged)
    assert all(partial < work.num_partials for *_, partial in items)


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
