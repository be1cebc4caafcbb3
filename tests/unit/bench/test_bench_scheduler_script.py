"""What bench/scheduler.py measures, at sizes that take no time."""

from __future__ import annotations

import asyncio

import pytest
from bench_scripts import load_script

bench, cell = load_script("scheduler"), load_script("scheduler_cell")


def test_every_figure_is_there_and_stages_add_up() -> None:
    """Each size has its figure and its stages, which come to no more than the whole and are nearly all of it."""
    figures = asyncio.run(bench.run((2, 5), num_steps=6, num_waiting=10, num_rounds=1))
    assert list(figures["us_per_sequence_step"]) == ["2", "5"]
    for size, total in figures["us_per_sequence_step"].items():
        assert sum(figures["breakdown_us"][size].values()) == pytest.approx(total, rel=0.01)
    assert figures["max_step_ms_10k_waiting"] == max(figures["max_step_ms_by_policy"].values()) > 0
    assert figures["admitted_per_s"] > 0
    bench.print_tables(figures)


def test_a_full_cache_has_no_free_block() -> None:
    """In the measurement with a full cache every block that a sequence gets takes the place of a cached one."""

    async def free_blocks() -> int:
        async with bench.open_cell(2, num_blocks=9) as opened:
            texts = bench.prompts(64)
            for _ in range(3):
                opened.submit(next(texts), 1)
            while opened.engine.load().num_requests:
                await opened.step()
            [executor] = opened.engine.load().executors
            return int(executor.free_blocks)

    assert asyncio.run(free_blocks()) == 0


def test_a_disturbed_round_counts_for_nothing() -> None:
    """Of equal steps the median counts, so a round in which one of them took long changes no figure."""
    rounds = [[cell.Step(4, seconds, {"apply": seconds}) for seconds in each] for each in ((1, 2), (1, 99), (3, 2))]
    typical = bench.typical(rounds)
    assert [step.seconds for step in typical] == [1, 2]
    assert bench.us_a_row(typical) == bench.us_a_row(typical, "apply") == 1e6 * 3 / 8


def test_time_within_time_counts_once() -> None:
    """A stage that runs within another is charged to itself alone."""
    watch = cell.Stopwatch()
    watch.enter("outer")
    before = watch.enter("inner")
    watch.enter(before)
    watch.enter(None)
    assert before == "outer"
    assert set(watch.seconds) == {"outer", "inner"}
    assert watch.total() == sum(watch.seconds.values())
