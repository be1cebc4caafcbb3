"""Compiled paged attention: a row's bits depend on its own context alone, on every instruction set."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from attention_problem import Problem, Row
from hypothesis import given
from hypothesis import strategies as st
from instruction_sets import each_instruction_set
from torch import Tensor

from executor_svc.kernels.native.isa import InstructionSet
from executor_svc.kernels.native.library import load_library
from executor_svc.kernels.paged_attention import PlanAttention
from executor_svc.kernels.paged_attention.cpu import make_plan_attention

ROWS: list[Row] = [(1, 5), (17, 17), (1, 300), (70, 600), (1, 1300), (33, 256), (1, 257), (300, 300), (1, 1), (2, 513)]
Plan = Callable[[int], PlanAttention]
"""Gives the op with a team of so many threads."""


@pytest.fixture
def plan(isa: InstructionSet) -> Iterator[Plan]:
    """The op of an instruction set; the size of its team is put back."""

    def with_threads(count: int) -> PlanAttention:
        return make_plan_attention(load_library(count, isa))

    yield with_threads
    load_library(None, isa)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    whole = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[a.dtype]
    return torch.equal(a.view(whole), b.view(whole))


def _parts(out: Tensor, rows: list[Row]) -> list[Tensor]:
    return list(out.split([query for query, _ in rows]))


@each_instruction_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((5, 1), 33), ((2, 2), 80)])
def test_rows_beside_it_do_not_count(plan: Plan, dtype: torch.dtype, heads: tuple[int, int], head_dim: int) -> None:
    """Each row of a mixed batch gets the bits that it gets alone."""
    problem = Problem(ROWS, heads=heads, head_dim=head_dim, dtype=dtype)
    for row, part in enumerate(_parts(problem.run(plan(2)), ROWS)):
        assert _same_bits(part, problem.run_part(plan(1), row, 0, len(part)))


@each_instruction_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [1, 7, 64, 65, 256, 300])
def test_chunks_do_not_count(plan: Plan, dtype: torch.dtype, chunk: int) -> None:
    """A prompt computed in chunks, down to single tokens as in decode, gets the bits that it gets in one go."""
    length = 530
    problem = Problem([(length, length)], heads=(6, 2), head_dim=24, dtype=dtype)
    whole = problem.run(plan(2))
    starts = range(0, length, chunk) if chunk > 1 else (0, 1, 63, 64, 255, 256, 257, 511, 512, 529)
    for start in starts:
        stop = min(start + chunk, length)
        assert _same_bits(problem.run_part(plan(2), 0, start, stop), whole[start:stop])


@each_instruction_set
def test_threads_do_not_count(plan: Plan) -> None:
    """One thread, and many that share long contexts among them, give the same bits; so does one call after another."""
    for rows in ([(1, 3000)], [(3, 2900), (1, 20)], ROWS):
        problem = Problem(rows, heads=(6, 2), head_dim=64)
        alone = problem.run(plan(1))
        for threads in (2, 3, 8, 8):
            assert _same_bits(problem.run(plan(threads)), alone)


SHARED = [(1, 1100), (1, 1030), (20, 1060), (1, 1040), (3, 1300), (1, 1025)]


@each_instruction_set
@pytest.mark.parametrize("shared_blocks", [15, 16, 17, 33, 50, 64])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_shared_prefix_does_not_count(plan: Plan, shared_blocks: int, threads: int) -> None:
    """Rows whose contexts begin in the same blocks, which are read once for all, get the bits that each gets alone."""
    problem = Problem(SHARED, heads=(6, 2), head_dim=40, shared_blocks=shared_blocks)
    torch.testing.assert_close(problem.run(plan(threads)).double(), problem.dense(), rtol=1e-5, atol=1e-5)
    for row, part in enumerate(_parts(problem.run(plan(threads)), SHARED)):
        assert _same_bits(part, problem.run_part(plan(1), row, 0, len(part)))


@each_instruction_set
def test_a_shared_prefix_in_blocks_of_odd_size(plan: Plan) -> None:
    """Partitions that end inside a block are shared too where the block is."""
    rows = [(1, 600), (1, 601), (9, 640)]
    problem = Problem(rows, heads=(3, 1), head_dim=16, shared_blocks=180, block_size=3)
    for row, part in enumerate(_parts(problem.run(plan(2)), rows)):
        assert _same_bits(part, problem.run_part(plan(1), row, 0, len(part)))


@given(
    rows=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 700)), min_size=1, max_size=5),
    shared_blocks=st.integers(0, 40),
    threads=st.integers(1, 4),
    group=st.integers(1, 7),
)
def test_any_batch(rows: list[Row], shared_blocks: int, threads: int, group: int) -> None:
    """Whatever comes together, with whatever shared and however many threads, each row gets the bits it gets alone."""
    batch = [(query, shared_blocks * 16 + query + before) for query, before in rows]
    problem = Problem(batch, heads=(2 * group, 2), head_dim=12, shared_blocks=shared_blocks)
    out = problem.run(make_plan_attention(load_library(threads)))
    alone = make_plan_attention(load_library(1))
    for row, part in enumerate(_parts(out, batch)):
        assert _same_bits(part, problem.run_part(alone, row, 0, len(part)))
    load_library(None)


@each_instruction_set
@pytest.mark.parametrize("position", [0, 63, 64, 300, 519])
def test_later_tokens_do_not_count(plan: Plan, position: int) -> None:
    """A NaN in a key and a value turns the outputs that see it to NaN, and leaves the bits of those before it."""
    problem = Problem([(200, 520), (1, 40)], heads=(6, 2), head_dim=24)
    sound = problem.run(plan(2))
    block = int(problem.metadata.block_tables[0, position // 16])
    for cache in (problem.key_cache, problem.value_cache):
        kept = cache[block, position % 16].clone()
        cache[block, position % 16] = torch.nan
        out = problem.run(plan(2))
        cache[block, position % 16] = kept
        first = max(0, position - 320)
        assert out[first:200].isnan().all()
        assert _same_bits(out[:first], sound[:first])
        assert _same_bits(out[200:], sound[200:])


@each_instruction_set
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_query_head_comes_out_as_nan(plan: Plan, bad: float) -> None:
    """A query head that is not finite gives NaN, whatever its place in a tile, and touches no other head or token."""
    problem = Problem([(9, 300), (1, 20)], heads=(9, 3), head_dim=16)
    sound = problem.run(plan(2))
    for token, head in ((0, 0), (4, 5), (8, 8), (9, 7)):
        spoilt = problem.query.clone()
        kept, problem.query = problem.query, spoilt
        spoilt[token, head, 3] = bad
        out = problem.run(plan(2)).clone()
        problem.query = kept
        assert out[token, head].isnan().all()
        out[token, head] = sound[token, head]
        assert _same_bits(out, sound)
