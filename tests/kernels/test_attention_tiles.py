"""Attention of bfloat16 by AMX tiles, on the processor's and on emulated ones: right over every shape, and a row's bits
depend on what it sees alone, though few rows and many are multiplied in different ways.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attention_problem import Problem, Row
from instruction_sets import instruction_set_param, libraries
from torch import Tensor

from executor_svc.cpu_features import cpu_features
from executor_svc.kernels import build_kernels
from executor_svc.kernels.native.isa import INSTRUCTION_SETS, InstructionSet
from executor_svc.kernels.native.library import load_library
from executor_svc.kernels.paged_attention import PlanAttention
from executor_svc.kernels.paged_attention.cpu import make_plan_attention

ROWS: list[Row] = [(1, 5), (17, 17), (1, 300), (70, 600), (1, 700), (33, 128), (1, 129), (1, 1), (2, 513), (90, 320)]
reference_set = build_kernels("reference")
each_tiled_set = pytest.mark.parametrize(
    "isa",
    [instruction_set_param(INSTRUCTION_SETS[-1]), instruction_set_param(libraries(cpu_features())[0])],
)


@pytest.fixture(autouse=True)
def team() -> Iterator[None]:
    """The size of the best set's team is put back."""
    yield
    load_library(None)


def _plan(isa: InstructionSet, threads: int = 2) -> PlanAttention:
    return make_plan_attention(load_library(threads, isa))


def _problem(rows: list[Row], heads: tuple[int, int] = (9, 3), head_dim: int = 64, **options: int) -> Problem:
    return Problem(rows, heads=heads, head_dim=head_dim, dtype=torch.bfloat16, **options)


def _assert_close(out: Tensor, expected: Tensor) -> None:
    """Within the tolerance of bfloat16 against float32: weights and outputs are rounded to 8 bits."""
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@each_tiled_set
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [
        ((9, 3), 64),
        ((4, 4), 33),
        ((16, 1), 80),
        ((14, 1), 96),
        ((16, 2), 128),
        ((10, 5), 32),
        ((3, 1), 256),
        ((20, 1), 64),
    ],
)
def test_every_shape(isa: InstructionSet, heads: tuple[int, int], head_dim: int) -> None:
    """Groups of 1 to 20 heads of any width, with windows and caps or without, give what the reference gives."""
    for window, soft_cap in ((0, 0.0), (70, 0.0), (130, 5.0)):
        problem = Problem(
            ROWS, heads=heads, head_dim=head_dim, dtype=torch.bfloat16, window=window, soft_cap=soft_cap, seed=window
        )
        expected = problem.run(reference_set.plan_attention)
        _assert_close(problem.run(_plan(isa)), expected)


@each_tiled_set
@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 32, 48, 256])
def test_every_block_size(isa: InstructionSet, block_size: int) -> None:
    """Tokens that do not lie at one distance are copied: the bits are those of blocks that tiles take as they lie."""
    problem, usual = _problem(ROWS, block_size=block_size), _problem(ROWS)
    problem.query = usual.query
    for table, (keys, values) in zip(problem.metadata.block_tables, usual.contexts, strict=True):
        slots = (table[:, None] * block_size + torch.arange(block_size)).flatten()[: len(keys)]
        problem.key_cache.view(-1, *keys.shape[1:])[slots] = keys
        problem.value_cache.view(-1, *values.shape[1:])[slots] = values
    out = problem.run(_plan(isa))
    _assert_close(out, problem.run(reference_set.plan_attention))
    assert _same_bits(out, usual.run(_plan(isa)))


@each_tiled_set
@pytest.mark.parametrize(("heads", "head_dim"), [((6, 2), 64), ((8, 1), 128), ((3, 3), 40)])
@pytest.mark.parametrize("window", [0, 100])
def test_few_rows_and_many_get_the_same_bits(
    isa: InstructionSet, heads: tuple[int, int], head_dim: int, window: int
) -> None:
    """A prompt in one go, in chunks of a few tokens and token by token."""
    length = 400
    problem = _problem([(length, length)], heads, head_dim, window=window)
    whole = problem.run(_plan(isa))
    for chunk in (1, 2, 5, 50, 129):
        starts = range(0, length, chunk) if chunk > 5 else (0, 1, 15, 16, 31, 127, 128, 200, 255, 300, length - chunk)
        for start in starts:
            stop = min(start + chunk, length)
            assert _same_bits(problem.run_part(_plan(isa), 0, start, stop), whole[start:stop])


@each_tiled_set
@pytest.mark.parametrize("shared_blocks", [7, 8, 17, 33])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_shared_prefix_does_not_count(isa: InstructionSet, shared_blocks: int, threads: int) -> None:
    """Rows whose contexts begin in the same blocks get the bits that each gets alone, with a window or without."""
    rows: list[Row] = [(1, 700), (1, 630), (20, 660), (1, 640), (3, 900), (1, 625)] + [(1, 600 + i) for i in range(20)]
    for window in (0, 640):
        problem = _problem(rows, (6, 2), shared_blocks=shared_blocks, window=window)
        out = problem.run(_plan(isa, threads))
        _assert_close(out, problem.run(reference_set.plan_attention))
        for row, part in enumerate(out.split([query for query, _ in rows])):
            assert _same_bits(part, problem.run_part(_plan(isa, 1), row, 0, len(part)))


@each_tiled_set
@pytest.mark.parametrize("query", [3, 200])
@pytest.mark.parametrize("position", [330, 383, 384, 390, 519])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_later_tokens_do_not_count(isa: InstructionSet, query: int, position: int, bad: float) -> None:
    """What is not finite in a key or a value spoils the outputs that see it, and leaves the bits of those before it,
    which share its tile.
    """
    problem = _problem([(query, 520), (1, 40)], (6, 2))
    sound = problem.run(_plan(isa))
    block = int(problem.metadata.block_tables[0, position // 16])
    first = max(0, position - (520 - query))
    for cache in (problem.key_cache, problem.value_cache):
        kept = cache[block, position % 16].clone()
        cache[block, position % 16] = bad
        out = problem.run(_plan(isa))
        cache[block, position % 16] = kept
        assert _same_bits(out[:first], sound[:first])
        assert _same_bits(out[query:], sound[query:])
        if cache is problem.value_cache or bad is torch.nan:
            assert not out[first:query].isfinite().any()


@each_tiled_set
def test_tokens_that_a_window_has_passed_do_not_count(isa: InstructionSet) -> None:
    """A NaN within the block where a window begins is seen by the tokens before, and by none that have passed it."""
    problem = _problem([(40, 300), (1, 300)], (6, 2), window=100)
    sound = problem.run(_plan(isa))
    position = 185
    block = int(problem.metadata.block_tables[0, position // 16])
    for cache in (problem.key_cache, problem.value_cache):
        kept = cache[block, position % 16].clone()
        cache[block, position % 16] = torch.nan
        out = problem.run(_plan(isa))
        cache[block, position % 16] = kept
        passed = position + 100 - 260
        assert out[:passed].isnan().all()
        assert _same_bits(out[passed:], sound[passed:])


@each_tiled_set
@pytest.mark.parametrize("rows", [[(2, 300), (1, 20)], [(30, 300), (1, 20)]], ids=["few", "many"])
def test_a_bad_query_head_comes_out_as_nan(isa: InstructionSet, rows: list[Row]) -> None:
    """A query head that is not finite gives NaN and touches no other head or token."""
    problem = _problem(rows)
    sound = problem.run(_plan(isa))
    last = len(problem.query) - 1
    for bad, token, head in ((torch.nan, 0, 0), (torch.inf, 1, 5), (torch.nan, last - 1, 8), (-torch.inf, last, 7)):
        kept, problem.query = problem.query, problem.query.clone()
        problem.query[token, head, 3] = bad
        out = problem.run(_plan(isa)).clone()
        problem.query = kept
        assert out[token, head].isnan().all()
        out[token, head] = sound[token, head]
        assert _same_bits(out, sound)


@each_tiled_set
@pytest.mark.parametrize("scale", [-0.1, 0.0, 3.0])
def test_any_scale(isa: InstructionSet, scale: float) -> None:
    """Scores may be turned round, all the same, or far apart."""
    problem = _problem([(1, 200), (40, 150)])
    problem.scale = scale
    expected = problem.run(reference_set.plan_attention)
    _assert_close(problem.run(_plan(isa)), expected)


@each_tiled_set
def test_rounding_has_no_bias(isa: InstructionSet) -> None:
    """Over values that are all the same number the output is that number: weights lose to rounding what their sum does
    not, and of many tokens no more than of few.
    """
    problem = _problem([(1, 1500), (50, 1500)])
    problem.value_cache.fill_(1.0)
    out = problem.run(_plan(isa)).float()
    torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=2**-8)
