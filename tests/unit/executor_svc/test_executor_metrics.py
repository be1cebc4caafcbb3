"""The executor's figures: what a step adds to them, and that the page is there while the model loads."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from executor_stack import TIMEOUT, Stack, first_step, running_executor
from factories import make_llama
from metrics_page import Page, page_of, scrape
from prometheus_client import CollectorRegistry

from executor_svc import load as load_module
from executor_svc.batch import (
    RowStatus,
    StageTimings,
    StepBatch,
    StepFailure,
    StepFailureReason,
    StepResult,
)
from executor_svc.metrics import OUTCOMES, STAGES, ExecutorMetrics, LiveState
from executor_svc.server import ExecutorServer
from octavo.models.prepare import prepare
from octavo.rpc.server import PortTakenError
from octavo.settings import ExecutorSettings

PREFIX = "octavo_executor"


def _page(*answers: tuple[StepBatch, StepResult]) -> Page:
    registry = CollectorRegistry()
    metrics = ExecutorMetrics(registry)
    for batch, result in answers:
        metrics.step_answered(batch, result)
    return page_of(registry)


def test_every_series_is_on_the_page_before_anything_happens() -> None:
    """A rate over a counter that appears with its first event would miss that event."""
    page = _page()
    for outcome in OUTCOMES:
        assert page[f'{PREFIX}_steps_total{{outcome="{outcome}"}}'] == 0
    for status in RowStatus:
        assert page[f'{PREFIX}_rows_total{{status="{status.name.lower()}"}}'] == 0
    for stage in STAGES:
        assert page[f'{PREFIX}_step_seconds_count{{stage="{stage}"}}'] == 0


def test_a_step_counts_its_rows_its_tokens_and_its_stages() -> None:
    """Tokens are those of the rows that were computed; each stage is observed with its own seconds."""
    batch = StepBatch(1, 1, handles=(1, 2, 3), num_scheduled_tokens=(5, 7, 1))
    result = StepResult(
        1,
        1,
        handles=(1, 2, 3),
        statuses=(RowStatus.OK, RowStatus.NAN, RowStatus.OK),
        timings=StageTimings(queue=0.25, prepare=0.5, forward=1.0, sample=2.0, ahead=4.0, idle=0.0625),
    )
    page = _page((batch, result))
    assert page[f'{PREFIX}_steps_total{{outcome="ok"}}'] == 1
    assert page[f'{PREFIX}_rows_total{{status="ok"}}'] == 2
    assert page[f'{PREFIX}_rows_total{{status="nan"}}'] == 1
    assert page[f"{PREFIX}_tokens_total"] == 6
    assert page[f"{PREFIX}_step_rows_sum"] == 3
    seconds = [page[f'{PREFIX}_step_seconds_sum{{stage="{stage}"}}'] for stage in STAGES]
    assert seconds == [0.25, 0.5, 1.0, 2.0, 4.0]
    assert page[f"{PREFIX}_step_gap_seconds_sum"] == 0.0625


def test_gaps_are_told_apart_by_tens_of_microseconds() -> None:
    """A gap has its bucket where others would be all in one; a step that had nothing to go on with has none."""
    batch = StepBatch(1, 1, handles=(1,), num_scheduled_tokens=(1,))
    idle = (None, 15e-6, 25e-6, 280e-6)
    results = [StepResult(1, 1, (1,), (RowStatus.OK,), timings=StageTimings(idle=each)) for each in idle]
    page = _page(*((batch, result) for result in results))
    below = {bound: page[f'{PREFIX}_step_gap_seconds_bucket{{le="{bound}"}}'] for bound in ("1e-05", "2e-05", "3e-05")}
    assert below == {"1e-05": 0, "2e-05": 1, "3e-05": 2}
    assert page[f'{PREFIX}_step_gap_seconds_bucket{{le="0.00025"}}'] == 2
    assert page[f'{PREFIX}_step_gap_seconds_bucket{{le="0.0003"}}'] == 3
    assert page[f"{PREFIX}_step_gap_seconds_count"] == 3
    assert page[f"{PREFIX}_tokens_total"] == 4


@pytest.mark.parametrize("reason", StepFailureReason, ids=lambda reason: reason.name.lower())
def test_a_failed_step_counts_as_its_outcome_alone(reason: StepFailureReason) -> None:
    """It has computed nothing, so no rows, tokens or stages are counted."""
    batch = StepBatch(1, 1, handles=(1,), num_scheduled_tokens=(5,))
    page = _page((batch, StepResult(1, 1, failure=StepFailure(reason, ""))))
    changed = {series: value for series, value in page.items() if value}
    assert changed == {f'{PREFIX}_steps_total{{outcome="{reason.name.lower()}"}}': 1}


def test_a_step_without_rows_is_a_step_and_no_more() -> None:
    """A step that only releases handles would pull the distributions to zero."""
    page = _page((StepBatch(1, 1, released_handles=(4,)), StepResult(1, 1)))
    assert page[f'{PREFIX}_steps_total{{outcome="ok"}}'] == 1
    assert page[f"{PREFIX}_step_rows_count"] == 0
    assert page[f'{PREFIX}_step_seconds_count{{stage="forward"}}'] == 0


@pytest.mark.asyncio
async def test_a_step_counts_also_where_its_session_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    """What the device did is counted, heard or not; the session's gauge follows the stream."""
    async with running_executor(caplog) as stack:
        registry = CollectorRegistry()
        metrics = ExecutorMetrics(registry)
        registry.register(LiveState(lambda: stack.servicer.has_session))
        counted = asyncio.Event()

        def on_answer(batch: StepBatch, result: StepResult) -> None:
            metrics.step_answered(batch, result)
            counted.set()

        stack.worker._on_answer = on_answer
        entered, leave = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def hold(number: int) -> None:
            loop.call_soon_threadsafe(entered.set)
            assert leave.wait(TIMEOUT)

        stack.before_forward = hold
        assert page_of(registry)[f"{PREFIX}_session"] == 0
        peer = stack.peer()
        await peer.begin(1, 7)
        assert page_of(registry)[f"{PREFIX}_session"] == 1
        await peer.write(step_batch=first_step())
        await asyncio.wait_for(entered.wait(), TIMEOUT)
        peer.call.cancel()
        await _session_over(stack)
        assert page_of(registry)[f"{PREFIX}_session"] == 0
        leave.set()
        await asyncio.wait_for(counted.wait(), TIMEOUT)
        assert page_of(registry)[f"{PREFIX}_tokens_total"] == 3


async def _session_over(stack: Stack) -> None:
    async with asyncio.timeout(TIMEOUT):
        while stack.servicer.has_session:
            await asyncio.sleep(0.01)


@pytest.fixture(name="settings")
def _settings(tmp_path: Path) -> ExecutorSettings:
    """Of a tiny model on free ports."""
    folder = make_llama(tmp_path / "tiny", max_position_embeddings=128)
    prepare(str(folder), report=lambda line: None)
    return ExecutorSettings(
        model=str(folder), port=0, metrics_port=0, dtype="float32", threads=1, max_num_seqs=4, block_size=8
    )


@pytest.mark.asyncio
async def test_the_page_is_there_while_the_model_loads_and_tells_what_was_loaded(
    settings: ExecutorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scrape during the load finds no session and nothing held; after it, blocks, bytes and the time it took."""
    entered, leave = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    load_model = load_module.load_model

    def held_back(*arguments: object, **named: object) -> object:
        loop.call_soon_threadsafe(entered.set)
        assert leave.wait(TIMEOUT)
        return load_model(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(load_module, "load_model", held_back)
    server = ExecutorServer(settings)
    start = asyncio.create_task(server.start())
    await asyncio.wait_for(entered.wait(), TIMEOUT)
    page = await scrape(server.metrics_port)
    assert page[f"{PREFIX}_session"] == 0
    assert f"{PREFIX}_kv_blocks" not in page
    leave.set()
    await asyncio.wait_for(start, TIMEOUT)
    page = await scrape(server.metrics_port)
    assert page[f"{PREFIX}_kv_blocks"] == 4 * 16
    assert page[f"{PREFIX}_kv_bytes"] % (4 * 16 + 1) == 0
    assert page[f"{PREFIX}_kv_bytes"] > 0
    assert page[f"{PREFIX}_weights_bytes"] > 0
    assert page[f"{PREFIX}_model_load_seconds"] > 0
    # The warm-up is nobody's work.
    assert page[f'{PREFIX}_steps_total{{outcome="ok"}}'] == 0
    await server.stop()
    with pytest.raises(OSError, match="refused"):
        await scrape(server.metrics_port)


@pytest.mark.asyncio
async def test_a_taken_metrics_port_is_said_before_the_model_is_loaded(
    settings: ExecutorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading can take minutes; the error names the flag, and no thread is left."""
    first = ExecutorServer(settings)
    await first.start()
    monkeypatch.setattr(load_module, "load_model", None)
    fields = {**vars(settings), "metrics_port": first.metrics_port}
    with pytest.raises(PortTakenError, match="--metrics-port"):
        await ExecutorServer(ExecutorSettings(**fields)).start()
    await first.stop()
    assert "device" not in {thread.name for thread in threading.enumerate()}
