"""Windows and soft caps in paged attention: every set against dense float64 and the reference, passed blocks that hold
NaN, and bits that depend on a row's own context alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attention_problem import Problem, Row
from hypothesis import given
from hypothesis import strategies as st
from instruction_sets import each_instruction_set
from torch import Tensor

from executor_svc.kernels import KernelSet, build_kernels
from executor_svc.kernels.native.isa import InstructionSet
from executor_svc.kernels.native.library import load_library
from executor_svc.kernels.paged_attention import PlanAttention
from executor_svc.kernels.paged_attention.cpu import make_plan_attention

TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}
ROWS: list[Row] = [(1, 5), (17, 17), (1, 300), (70, 600), (1, 1300), (33, 256), (1, 257), (1, 1), (2, 513), (90, 320)]
WINDOWS = (1, 2, 15, 16, 17, 63, 64, 65, 100, 255, 256, 257, 600, 5000)

each_dtype = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=["float32", "bfloat16"])
reference_set = build_kernels("reference")


@pytest.fixture(autouse=True)
def team() -> Iterator[None]:
    """The size of the best set's team is put back."""
    yield
    load_library(None)


def _plan(isa: InstructionSet | None, threads: int) -> PlanAttention:
    return make_plan_attention(load_library(threads, isa))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _check_each_row_alone(problem: Problem, out: Tensor, alone: PlanAttention) -> None:
    for row, part in enumerate(out.split([query for query, _ in problem.rows])):
        assert not part.isnan().any()
        assert _same_bits(part, problem.run_part(alone, row, 0, len(part)))


@pytest.mark.parametrize("window", [0, 1, 40, 257, 600])
@pytest.mark.parametrize("soft_cap", [0.0, 0.5, 30.0])
def test_equals_dense_float64(any_set: KernelSet, window: int, soft_cap: float) -> None:
    """Every set gives softmax(cap * tanh(scores / cap)) over exactly the last `window` tokens, itself included."""
    rows = [(1, 5), (3, 300), (1, 701), (45, 320)]
    problem = Problem(rows, heads=(6, 2), head_dim=16, window=window, soft_cap=soft_cap)
    out = problem.run(any_set.plan_attention)
    torch.testing.assert_close(out.double(), problem.dense(), **TOLERANCES[torch.float32])


@each_instruction_set
@each_dtype
@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((4, 4), 33), ((7, 1), 20), ((16, 2), 128)])
def test_every_instruction_set(isa: InstructionSet, dtype: torch.dtype, heads: tuple[int, int], head_dim: int) -> None:
    """Each set's kernel gives what the reference gives for windows that end at, before and behind every boundary."""
    for window in WINDOWS:
        problem = Problem(ROWS, heads=heads, head_dim=head_dim, dtype=dtype, window=window, soft_cap=window % 2 * 20.0)
        expected = problem.run(reference_set.plan_attention)
        torch.testing.assert_close(problem.run(_plan(isa, 2)), expected, **TOLERANCES[dtype])


@each_instruction_set
@each_dtype
@pytest.mark.parametrize("window", [1, 17, 64, 200, 300])
def test_rows_beside_it_and_threads_do_not_count(isa: InstructionSet, dtype: torch.dtype, window: int) -> None:
    """Each row of a mixed batch, on any number of threads, gets the bits that it gets alone on one."""
    problem = Problem(ROWS, heads=(6, 2), head_dim=40, dtype=dtype, window=window, soft_cap=25.0)
    for threads in (1, 2, 3, 8):
        _check_each_row_alone(problem, problem.run(_plan(isa, threads)), _plan(isa, 1))


@each_instruction_set
@each_dtype
@pytest.mark.parametrize("window", [1, 40, 64, 256, 270])
def test_chunks_do_not_count(isa: InstructionSet, dtype: torch.dtype, window: int) -> None:
    """A prompt computed in chunks, down to single tokens as in decode, gets the bits that it gets in one go, though by
    then the blocks that its window has passed are gone.
    """
    length = 530
    problem = Problem([(length, length)], heads=(6, 2), head_dim=24, dtype=dtype, window=window)
    whole = problem.run(_plan(isa, 2))
    for chunk in (7, 65, 300):
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            assert _same_bits(problem.run_part(_plan(isa, 2), 0, start, stop), whole[start:stop])
    for position in (0, 1, 39, 40, 63, 64, 255, 256, 257, 319, 320, 511, 512, 529):
        part = problem.run_part(_plan(isa, 1), 0, position, position + 1)
        assert _same_bits(part, whole[position : position + 1])


SHARED: list[Row] = [(1, 1100), (1, 1030), (20, 1060), (1, 1040), (3, 1300), (1, 1025), (1, 520), (1, 1801)]


@each_instruction_set
@pytest.mark.parametrize("window", [100, 300, 512, 700, 1000, 1100, 1500])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_shared_prefix_in_a_window(isa: InstructionSet, window: int, threads: int) -> None:
    """Rows whose contexts begin in the same blocks, which each row's window has passed by as much as it will, get the
    bits that each gets alone.
    """
    problem = Problem(SHARED, heads=(6, 2), head_dim=40, shared_blocks=31, window=window)
    out = problem.run(_plan(isa, threads))
    _check_each_row_alone(problem, out, _plan(isa, 1))
    torch.testing.assert_close(out, problem.run(reference_set.plan_attention), **TOLERANCES[torch.float32])


@given(
    rows=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 700)), min_size=1, max_size=5),
    shared_blocks=st.integers(0, 40),
    block_size=st.sampled_from([3, 16]),
    window=st.integers(1, 900),
    threads=st.integers(1, 4),
    group=st.integers(1, 7),
)
def test_any_batch(rows: list[Row], shared_blocks: int, block_size: int, window: int, threads: int, group: int) -> None:
    """Whatever comes together, each row gets what the reference gives it, and the bits it gets alone."""
    batch = [(query, shared_blocks * block_size + query + before) for query, before in rows]
    shape = {"heads": (2 * group, 2), "head_dim": 12, "block_size": block_size}
    problem = Problem(batch, **shape, shared_blocks=shared_blocks, window=window)
    out = problem.run(_plan(None, threads))
    _check_each_row_alone(problem, out, _plan(None, 1))
    torch.testing.assert_close(out, problem.run(reference_set.plan_attention), **TOLERANCES[torch.float32])


def test_layers_of_one_step_have_windows_of_their_own(any_set: KernelSet) -> None:
    """A plan serves layers with different windows, and with none, in turn: each as if it were alone."""
    rows = [(1, 700), (20, 400), (1, 33)]
    problems = [Problem(rows, heads=(4, 2), head_dim=16, seed=1, window=window) for window in (0, 50, 300, 0, 50)]
    expected = [problem.run(any_set.plan_attention) for problem in problems]
    unwindowed = problems[0]
    with torch.inference_mode():
        attend = any_set.plan_attention(unwindowed.metadata, unwindowed.block_size)
        caches = (unwindowed.key_cache, unwindowed.value_cache)
        for problem, alone in zip(problems, expected, strict=True):
            assert torch.equal(attend(problem.query, *caches, problem.scale, window=problem.window), alone)


def test_a_capped_score_that_is_nan_or_infinite(any_set: KernelSet) -> None:
    """Infinite scores count as the cap does, and NaN turns its own row to NaN and no other."""
    rows = [(1, 40), (1, 40), (1, 40)]
    problem = Problem(rows, heads=(2, 2), head_dim=8, soft_cap=5.0)
    sound = problem.run(any_set.plan_attention)
    problem.query[1] = torch.nan
    problem.query[2] = 0.0
    problem.query[2, :, 0] = torch.inf
    out = problem.run(any_set.plan_attention)
    assert torch.equal(out[0], sound[0])
    assert out[1].isnan().all()
    torch.testing.assert_close(out.double()[2], problem.dense()[2], **TOLERANCES[torch.float32])
