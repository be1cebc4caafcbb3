"""What a cut of rows of one token must be: the host's, by plan_work, in tables that hold more than that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch

from executor_svc.kernels.paged_attention.work import PlacedWork, plan_work


def check_cut(plan: Callable[..., PlacedWork], context_lens: Sequence[int], processors: int, **sizes: int) -> None:
    """Raise AssertionError unless tiles and parts are the host's, their partial results are the ones that are merged,
    and what is left over names no line. `sizes`: as plan_work takes them.
    """
    group = sizes["group"]
    batch = SimpleNamespace(query_lens=(1,) * len(context_lens), context_lens_host=tuple(context_lens))
    expected = plan_work(batch, **sizes, processors=processors)  # type: ignore[arg-type]
    work = plan(torch.tensor(context_lens, dtype=torch.int32), **sizes, processors=processors)
    items = [item for item in work.items.tolist() if item[1] < group]
    rest = [item for item in work.items.tolist() if item[1] >= group]
    assert all(begin == end == 0 and partial == -1 for _, _, begin, end, partial in rest)
    assert all(0 <= item[0] < len(context_lens) for item in work.items.tolist())
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
