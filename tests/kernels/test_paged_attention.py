"""Paged attention: the reference against dense float64, every set against the reference, and nobody reads what is not
theirs.
"""

from __future__ import annotations

import pytest
import torch
from attention_problem import Problem, Row
from hypothesis import given
from hypothesis import strategies as st
from instruction_sets import each_instruction_set

from executor_svc.kernels import KernelSet, build_kernels
from executor_svc.kernels.native.isa import InstructionSet
from executor_svc.kernels.native.library import load_library
from executor_svc.kernels.paged_attention.cpu import make_plan_attention

TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}
BATCHES: dict[str, list[Row]] = {
    "one token": [(1, 1)],
    "one stream": [(1, 33)],
    "decode": [(1, context) for context in (1, 15, 16, 17, 31, 32, 33)],
    "decode, equal lengths": [(1, 32)] * 5,
    "decode, far apart": [(1, 700), (1, 3), (1, 690), (1, 8), (1, 350), (1, 349), (1, 12)],
    "prefill": [(query, query) for query in (1, 2, 15, 16, 17, 31, 32, 33)],
    "chunks": [(16, 17), (15, 31), (17, 48), (33, 100), (2, 33)],
    "mixed": [(1, 5), (17, 17), (1, 300), (8, 40), (1, 33), (33, 64), (1, 16), (1, 1), (1, 301)],
}
HEADS = [(1, 1), (4, 4), (9, 3), (8, 1), (6, 2)]

each_set = pytest.mark.usefixtures("kernels")
cpu_set = build_kernels("cpu")
"""Of the best instruction set; the others are below."""
reference_set = build_kernels("reference")


@each_set
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=["float32", "bfloat16"])
@pytest.mark.parametrize("batch", list(BATCHES))
def test_batches(kernels: KernelSet, batch: str, dtype: torch.dtype) -> None:
    """Every kind of ragged batch gives what dense float64 gives, though all memory around it is NaN."""
    problem = Problem(BATCHES[batch], heads=(6, 2), head_dim=16, dtype=dtype)
    out = problem.run(kernels.plan_attention)
    assert out.dtype == dtype
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), problem.dense(), **TOLERANCES[dtype])


@pytest.mark.parametrize("head_dim", [7, 8, 10, 33, 64, 80, 128])
@pytest.mark.parametrize("heads", HEADS)
def test_cpu_head_shapes(heads: tuple[int, int], head_dim: int) -> None:
    """Any number of heads and any width, odd ones too, agree with the reference."""
    problem = Problem(BATCHES["mixed"], heads=heads, head_dim=head_dim)
    torch.testing.assert_close(
        problem.run(cpu_set.plan_attention), problem.run(reference_set.plan_attention), **TOLERANCES[torch.float32]
    )


@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
def test_cpu_block_sizes(block_size: int) -> None:
    """Any block size agrees with the reference."""
    problem = Problem(BATCHES["mixed"], block_size=block_size, head_dim=16)
    torch.testing.assert_close(
        problem.run(cpu_set.plan_attention), problem.run(reference_set.plan_attention), **TOLERANCES[torch.float32]
    )


@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 80)), min_size=1, max_size=6),
    decodes=st.lists(st.integers(1, 400), max_size=12),
)
def test_cpu_any_batch(rows: list[Row], decodes: list[int]) -> None:
    """Whatever rows come together, each gets what the reference gives it."""
    batch = [(query, query + before) for query, before in rows] + [(1, context) for context in decodes]
    problem = Problem(batch, heads=(4, 2), head_dim=8)
    torch.testing.assert_close(
        problem.run(cpu_set.plan_attention), problem.run(reference_set.plan_attention), **TOLERANCES[torch.float32]
    )


@each_set
def test_nothing_is_changed(kernels: KernelSet) -> None:
    """Caches and query keep their bits, NaN included: masking happens in copies."""
    problem = Problem(BATCHES["mixed"], head_dim=8)
    before = [t.clone() for t in (problem.query, problem.key_cache, problem.value_cache)]
    problem.run(kernels.plan_attention)
    for tensor, copy in zip((problem.query, problem.key_cache, problem.value_cache), before, strict=True):
        assert torch.equal(tensor.contiguous().view(torch.int32), copy.contiguous().view(torch.int32))


@each_set
def test_one_plan_serves_every_layer(kernels: KernelSet) -> None:
    """A plan used on one layer's memory and then on another's leaves no trace of the first."""
    first, second = (Problem(BATCHES["mixed"], head_dim=8, seed=seed) for seed in (1, 2))
    second_alone = second.run(kernels.plan_attention)
    with torch.inference_mode():
        # The two problems differ in numbers and in block ids, not in shape: take the second's tables for both.
        plan = kernels.plan_attention(second.metadata, second.block_size)
        plan(first.query, torch.nan_to_num(first.key_cache), torch.nan_to_num(first.value_cache), first.scale)
        again = plan(second.query, second.key_cache, second.value_cache, second.scale)
    assert torch.equal(again, second_alone)


@each_set
def test_a_row_with_nan_harms_no_other(kernels: KernelSet) -> None:
    """Where one row's own context holds NaN, that row's output is NaN and every other row's is as without it."""
    rows = BATCHES["decode, equal lengths"] + [(4, 20)]
    sound, poisoned = Problem(rows, head_dim=8), Problem(rows, head_dim=8)
    poisoned.value_cache[poisoned.metadata.block_tables[2, 0].item()] = torch.nan
    expected, out = sound.run(kernels.plan_attention), poisoned.run(kernels.plan_attention)
    assert out[2].isnan().all()
    others = [0, 1, 3, 4, 5, 6, 7, 8]
    assert torch.equal(out[others], expected[others])


@each_instruction_set
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((9, 3), 64), ((4, 4), 33), ((7, 1), 20), ((3, 1), 6), ((40, 2), 128), ((18, 18), 128)]
)
def test_every_instruction_set(isa: InstructionSet, dtype: torch.dtype, heads: tuple[int, int], head_dim: int) -> None:
    """Each set's kernel gives what the reference gives, over one partition and several, whole tiles and rests."""
    plan_attention = make_plan_attention(load_library(2, isa))
    for name in ("mixed", "chunks", "decode, far apart"):
        problem = Problem(BATCHES[name], heads=heads, head_dim=head_dim, dtype=dtype)
        expected = problem.run(reference_set.plan_attention)
        torch.testing.assert_close(problem.run(plan_attention), expected, **TOLERANCES[dtype])


@each_instruction_set
def test_large_scores(isa: InstructionSet) -> None:
    """Scores far from zero neither overflow nor lose the softmax: all that counts is their distance to the largest."""
    plan_attention = make_plan_attention(load_library(2, isa))
    for factor in (-3000.0, 3000.0):
        problem = Problem([(1, 300), (5, 70)], head_dim=8)
        problem.key_cache[..., 0] += factor
        expected = problem.run(reference_set.plan_attention)
        torch.testing.assert_close(problem.run(plan_attention), expected, rtol=1e-3, atol=1e-3)
