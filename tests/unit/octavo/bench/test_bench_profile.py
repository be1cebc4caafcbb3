"""Where the time of a step goes: from two readings of the pages to parts, table, note and picture."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from test_bench_report import measured

from octavo.bench.document import document
from octavo.bench.plots import draw_profile
from octavo.bench.profile import Profile, Profiler
from octavo.bench.records import BenchError
from octavo.bench.report import report

SCHEDULER = """\
# TYPE octavo_schedule_seconds histogram
octavo_schedule_seconds_sum {schedule}
octavo_schedule_seconds_count {steps}
# TYPE octavo_step_hop_seconds histogram
octavo_step_hop_seconds_sum {hop}
octavo_step_hop_seconds_count {steps}
# TYPE octavo_publish_seconds histogram
octavo_publish_seconds_sum {publish}
octavo_publish_seconds_count {steps}
"""
EXECUTOR = """\
# TYPE octavo_executor_step_seconds histogram
octavo_executor_step_seconds_sum{{stage="prepare"}} {prepare}
octavo_executor_step_seconds_sum{{stage="forward"}} {forward}
octavo_executor_step_seconds_sum{{stage="sample"}} {sample}
octavo_executor_step_seconds_sum{{stage="ahead"}} {ahead}
octavo_executor_step_seconds_count{{stage="forward"}} {steps}
# TYPE octavo_executor_step_gap_seconds histogram
octavo_executor_step_gap_seconds_sum {gap}
octavo_executor_step_gap_seconds_count {steps}
# TYPE octavo_executor_step_rows histogram
octavo_executor_step_rows_sum {rows}
# TYPE octavo_executor_tokens_total counter
octavo_executor_tokens_total {tokens}
"""
OPS = """\
# TYPE octavo_executor_op_seconds_total counter
octavo_executor_op_seconds_total{{op="linear"}} {linear}
octavo_executor_op_seconds_total{{op="rotary_kv"}} {rotary}
octavo_executor_op_seconds_total{{op="sampling"}} {sample}
"""


def scheduler_page(steps: int) -> str:
    """A page after this many steps of 1 ms to build, 2 ms of hop and 3 ms to publish."""
    return SCHEDULER.format(steps=steps, schedule=steps / 1e3, hop=2 * steps / 1e3, publish=3 * steps / 1e3)


def executor_page(steps: int, *, are_ops_timed: bool = True) -> str:
    """Likewise of 0.1 ms idle, 1 ms inputs, 8 ms forward (of these 5 and 2 in ops), 0.5 ms sampling, 4 ms ahead."""
    ms = steps / 1e3
    times = {"prepare": ms, "forward": 8 * ms, "sample": 0.5 * ms, "gap": 0.1 * ms, "linear": 5 * ms, "rotary": 2 * ms}
    times["ahead"] = 4 * ms
    page = EXECUTOR + OPS if are_ops_timed else EXECUTOR
    return page.format(steps=steps, rows=4 * steps, tokens=6 * steps, **times)


class Pages:
    """Pages by address, as they are now."""

    def __init__(self) -> None:
        self.texts = {"s:1": scheduler_page(10), "e:1": executor_page(10), "e:2": executor_page(5)}

    def fetch(self, address: str) -> str:
        """As fetch_page."""
        if address not in self.texts:
            raise ConnectionRefusedError("Connection refused")
        return self.texts[address]


def profile_between(pages: Pages, *executors: str) -> Profile:
    """Read before and after 20 more steps at e:1 and 40 at e:2."""
    profiler = Profiler("s:1", executors, pages.fetch)

    async def run() -> Profile:
        await profiler.begin()
        pages.texts |= {"s:1": scheduler_page(70), "e:1": executor_page(30), "e:2": executor_page(45)}
        return await profiler.end()

    return asyncio.run(run())


def test_parts_are_means_of_the_steps_between_two_readings() -> None:
    """All executors together; ops that are of the forward pass come out of it, and the parts add up to a step."""
    profile = profile_between(Pages(), "e:1", "e:2")
    assert (profile.num_steps, profile.num_scheduled) == (60, 60)
    assert (profile.num_sequences, profile.num_tokens) == (pytest.approx(4), pytest.approx(6))
    expected = {
        "idle": 0.0001,
        "inputs": 0.001,
        "linear": 0.005,
        "rotary, KV write": 0.002,
        "rest of forward": 0.001,
        "sampling": 0.0005,
    }
    assert dict(profile.device) == pytest.approx(expected)
    assert profile.seconds == pytest.approx(0.0096)
    around = {"schedule": 0.001, "hop": 0.002, "publish": 0.003, "inputs ahead": 0.004}
    assert dict(profile.around) == pytest.approx(around)


@pytest.mark.parametrize("seconds", [0.0, 0.02])
def test_sums_over_ranks_are_a_part_where_there_are_several(seconds: float) -> None:
    """They come out of the forward pass like any op. An executor of one process has no such part."""
    pages = Pages()
    profiler = Profiler("s:1", ["e:1"], pages.fetch)

    async def run() -> Profile:
        await profiler.begin()
        ranks = f'octavo_executor_op_seconds_total{{op="ranks"}} {seconds}\n'
        pages.texts |= {"s:1": scheduler_page(30), "e:1": executor_page(30) + ranks}
        return await profiler.end()

    device = asyncio.run(run()).device
    assert ("ranks" in device) == bool(seconds)
    assert device.get("ranks", 0.0) == pytest.approx(seconds / 20)
    assert device["rest of forward"] == pytest.approx(0.001 - seconds / 20)


def test_table_and_document_hold_every_part() -> None:
    """Milliseconds and shares line by line; what runs beside a step has no share of it."""
    outcome = replace(measured(), profile=profile_between(Pages(), "e:1", "e:2"))
    text = report(outcome)
    lines = {words[0]: words[1:] for line in text.splitlines() if (words := re.split("  +", line))}
    assert lines["linear"] == ["5.000", "52.1%"]
    assert lines["idle"] == ["0.100", "1.0%"]
    assert lines["whole step"] == ["9.600"]
    assert lines["beside it: hop"] == ["2.000"]
    assert lines["beside it: inputs ahead"] == ["4.000"]
    assert "60, of 4.0 sequences and 6.0 tokens on average" in text
    assert "--executor-metrics" not in text
    written = document(outcome, datetime.now(UTC))["profile"]
    assert written["device"]["inputs"] == pytest.approx(0.001)
    assert written["seconds"] == pytest.approx(0.0096)


def test_executors_that_were_not_read_are_noted() -> None:
    """The scheduler's steps are those of all executors."""
    text = report(replace(measured(), profile=profile_between(Pages(), "e:1")))
    assert "note: the scheduler ran 60 steps and the executors that were read 20: name all" in text


@pytest.mark.parametrize(
    ("scheduler", "executor", "words"),
    [
        (
            "s:9",
            "e:1",
            r"cannot read http://s:9/metrics \(Connection refused\): name the page with --sch",
        ),
        ("s:1", "e:9", r"cannot read http://e:9/metrics .* --executor-metrics HOST:PORT"),
        ("e:1", "e:1", r"the page at e:1 is not that of a scheduler of this version"),
        ("s:1", "s:1", r"the page at s:1 is not that of an executor of this version"),
        ("s:1", "e:3", r"the executor at e:3 does not time its ops: start it with --profile-ops"),
        ("odd", "e:1", r"cannot read http://odd/metrics"),
    ],
)
def test_what_is_missing_is_said_with_what_to_do(scheduler: str, executor: str, words: str) -> None:
    """Before the run: a page that does not answer, is another's, is no page, or has no times of ops."""
    pages = Pages()
    pages.texts |= {"e:3": executor_page(1, are_ops_timed=False), "odd": "<html> of somebody else"}
    with pytest.raises(BenchError, match=words):
        asyncio.run(Profiler(scheduler, [executor], pages.fetch).begin())


def test_a_run_without_steps_has_no_profile() -> None:
    """A page of another cell counts nothing meanwhile; that is said, rather than zeros shown."""
    profiler = Profiler("s:1", ["e:1"], Pages().fetch)

    async def run() -> None:
        await profiler.begin()
        await profiler.end()

    with pytest.raises(BenchError, match="computed no step"):
        asyncio.run(run())


def test_the_picture_has_both_bars_and_every_part(tmp_path: Path) -> None:
    """It is drawn also where a part took no time."""
    profile = profile_between(Pages(), "e:1", "e:2")
    outcome = replace(measured(), profile=replace(profile, device=dict(profile.device) | {"idle": 0.0}))
    draw_profile(outcome, tmp_path / "profile.png")
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "profile.png").stat().st_size > 20_000
