"""One run from the first look to its figures, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_target import FakeTarget, Script
from virtual_time import clock, run_virtually

from octavo.bench.records import CANCELLED, OK, BenchError, RequestFailed
from octavo.bench.runner import Runner
from octavo.bench.session import Outcome, Session, run_until_stopped
from octavo.bench.settings import BenchSettings
from octavo.bench.target import GenerationOptions
from octavo.bench.workload import Lengths

REFUSED = RequestFailed("INVALID_ARGUMENT", "no such model")


def settings_of(**changes: Any) -> BenchSettings:
    """A closed loop of four requests, two at once, unless said otherwise."""
    settings = BenchSettings(
        options=GenerationOptions(),
        concurrency=2,
        rate=None,
        trace=None,
        num_requests=4,
        duration=None,
        input_tokens=Lengths("20"),
        output_tokens=Lengths("3"),
    )
    return replace(settings, **changes)


class Labels:
    """Notes what progress was shown for."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    @contextlib.asynccontextmanager
    async def show(self, runner: Runner, label: str) -> AsyncIterator[None]:
        """As shown_progress."""
        self.shown.append(label)
        yield
        assert runner.counters.live == 0


def run(target: FakeTarget, settings: BenchSettings, stop_after: float | None = None) -> tuple[Outcome | None, Labels]:
    """Make a run; stop it after so many seconds."""
    labels = Labels()

    async def main() -> Outcome | None:
        stopping = asyncio.Event()
        if stop_after is not None:
            asyncio.get_running_loop().call_later(stop_after, stopping.set)
        return await run_until_stopped(Session(settings, target, clock, labels.show), stopping)

    return run_virtually(main()), labels


def test_warm_up_is_left_out_of_the_figures() -> None:
    """Three slow first requests are sent and not measured."""
    target = FakeTarget()
    outcome, labels = run(target, settings_of(num_warmup=3, objectives={"ttft": 1.0}))
    assert outcome is not None
    assert len(target.requests) == 7
    assert len(outcome.result.records) == 4
    assert labels.shown == ["warm-up", "running"]
    assert (outcome.figures.num_ok, outcome.figures.output_tokens, outcome.figures.prompt_tokens) == (4, 12, 80)
    assert outcome.figures.goodput is not None
    assert outcome.info == target.info


def test_a_rate_and_a_trace_are_open_loops(tmp_path: Path) -> None:
    """Both send by the clock; their lag is told."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival": 0.5}\n{"arrival": 4, "max_tokens": 2}\n')
    outcome, _ = run(FakeTarget(), settings_of(concurrency=None, trace=trace, num_requests=None))
    assert outcome is not None
    assert [record.scheduled - outcome.result.origin for record in outcome.result.records] == [0.5, 4.0]
    outcome, _ = run(FakeTarget(), settings_of(concurrency=None, rate=3.0, num_requests=10))
    assert outcome is not None
    assert len(outcome.result.records) == 10
    assert outcome.figures.lag is not None


def test_stopping_keeps_what_has_ended() -> None:
    """After 0.8 s of requests of 0.7 s, two have ended and two are cancelled."""
    outcome, _ = run(FakeTarget(), settings_of(), stop_after=0.8)
    assert outcome is not None
    assert outcome.result.was_stopped
    assert [record.status for record in outcome.result.records] == [OK, OK, CANCELLED, CANCELLED]
    assert (outcome.figures.num_ok, outcome.figures.num_cancelled) == (2, 2)


def test_stopping_during_the_warm_up_leaves_nothing_to_tell() -> None:
    """None, and no request is left alive."""
    target = FakeTarget(Script(pauses=(5.0,)))
    outcome, labels = run(target, settings_of(num_warmup=2), stop_after=1.0)
    assert outcome is None
    assert labels.shown == ["warm-up"]
    assert sorted(target.cancelled) == [0, 1]


def test_a_server_that_refuses_every_warm_up_is_not_measured() -> None:
    """Its words are the error; where only some fail, the run goes on."""
    with pytest.raises(BenchError, match="every warm-up request failed, with INVALID_ARGUMENT: no such model"):
        run(FakeTarget(Script(failure=REFUSED)), settings_of(num_warmup=2))
    target = FakeTarget(scripts={0: Script(failure=REFUSED)})
    outcome, _ = run(target, settings_of(num_warmup=2))
    assert outcome is not None
    assert outcome.figures.errors == {"INVALID_ARGUMENT": 1}


def test_requests_that_the_model_cannot_hold_are_refused_before_the_run() -> None:
    """4,094 tokens in and 3 out are one more than the model takes."""
    target = FakeTarget()
    with pytest.raises(BenchError, match=r"longest request has 4097 tokens .* takes 4096: lower --input-tokens"):
        run(target, settings_of(input_tokens=Lengths("4094")))
    assert not target.requests
    assert run(FakeTarget(), settings_of(input_tokens=Lengths("4093")))[0] is not None


def test_a_bad_file_is_known_before_the_server_is_asked(tmp_path: Path) -> None:
    """A trace that is missing costs no connection."""

    class Unasked(FakeTarget):
        async def describe(self) -> Any:
            raise AssertionError("asked")

    with pytest.raises(BenchError, match="--trace: cannot read"):
        run(Unasked(), settings_of(concurrency=None, trace=tmp_path / "none"))
