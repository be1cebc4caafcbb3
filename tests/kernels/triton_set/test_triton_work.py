"""How attention is cut into programs: every pair that must be looked at is, once, and the parts find one another."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from executor_svc.kernels.paged_attention.work import LEAST_PART, plan_work


@given(
    rows=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 2000)), min_size=1, max_size=6),
    group=st.integers(1, 20),
    num_kv_heads=st.integers(1, 8),
    window=st.sampled_from([0, 1, 16, 300, 5000]),
    large_tile=st.sampled_from([16, 64]),
    processors=st.sampled_from([1, 4, 300]),
)
def test_each_line_meets_each_of_its_tokens_once(
    rows: list[tuple[int, int]], group: int, num_kv_heads: int, window: int, large_tile: int, processors: int
) -> None:
    """A line's tiles cover the tokens that it may read without a gap or a repeat, and read none beyond the row's."""
    query_lens = tuple(query for query, _ in rows)
    context_lens = tuple(query + before for query, before in rows)
    works = plan_work(
        SimpleNamespace(query_lens=query_lens, context_lens_host=context_lens),  # type: ignore[arg-type]
        group=group,
        num_kv_heads=num_kv_heads,
        window=window,
        large_tile=large_tile,
        processors=processors,
    )
    lines: Counter[tuple[int, int]] = Counter()
    for work in works:
        parts: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for row, first, begin, end, partial in work.items.tolist():
            parts.setdefault((row, first), []).append((begin, end, partial))
        merged = {(row, first): (partial, count) for row, first, partial, count in work.merges.tolist()}
        numbers = []
        for (row, first), tile_parts in parts.items():
            tile_parts.sort()
            assert all(one[1] == two[0] for one, two in pairwise(tile_parts))
            assert all(begin < end for begin, end, _ in tile_parts)
            tile_lines = range(first, min(first + work.tile, query_lens[row] * group))
            assert tile_lines, "a tile of nothing"
            lines.update((row, line) for line in tile_lines)
            before = context_lens[row] - query_lens[row]
            earliest, latest = before + tile_lines[0] // group, before + tile_lines[-1] // group
            assert tile_parts[0][0] == (max(earliest + 1 - window, 0) if window else 0)
            assert tile_parts[-1][1] == latest + 1
            if len(tile_parts) == 1:
                assert tile_parts[0][2] == -1
                assert (row, first) not in merged
            else:
                first_partial, count = merged[row, first]
                assert [partial for _, _, partial in tile_parts] == list(range(first_partial, first_partial + count))
                numbers += [partial for _, _, partial in tile_parts]
                assert all(end - begin >= LEAST_PART for begin, end, _ in tile_parts[:-1])
        assert sorted(numbers) == list(range(work.num_partials))
        lengths = [end - begin for _, _, begin, end, _ in work.items.tolist()]
        assert lengths == sorted(lengths, reverse=True)
    wanted = {(row, line) for row, query in enumerate(query_lens) for line in range(query * group)}
    assert set(lines) == wanted
    assert set(lines.values()) == {1}


def test_a_long_context_is_shared_among_the_processors() -> None:
    """One stream of 128k tokens gives every multiprocessor work; many short ones are not cut at all."""
    batch = SimpleNamespace(query_lens=(1,), context_lens_host=(131_072,))
    kind = {"group": 4, "num_kv_heads": 8, "window": 0, "large_tile": 64, "processors": 132}
    (work,) = plan_work(batch, **kind)  # type: ignore[arg-type]
    assert 132 <= len(work.items) * 8 <= 132 * 8
    many = SimpleNamespace(query_lens=(1,) * 256, context_lens_host=(200,) * 256)
    (work,) = plan_work(many, **kind)  # type: ignore[arg-type]
    assert (len(work.items), work.num_partials) == (256, 0)
