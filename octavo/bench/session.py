"""One run, from the first look at the server to its figures."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from octavo.bench.figures import Figures, figures_of
from octavo.bench.profile import Profile, Profiler
from octavo.bench.prompts import prompt_maker
from octavo.bench.records import OK, BenchError, BenchRequest
from octavo.bench.runner import Runner, RunResult
from octavo.bench.settings import BenchSettings
from octavo.bench.target import Clock, Target, TargetInfo
from octavo.bench.workload import Workload, WorkloadPlan, build_workload, read_prompts, read_trace

ShowProgress = Callable[[Runner, str], AbstractAsyncContextManager[None]]
_WARMUP_CONCURRENCY = 8


@dataclass(frozen=True)
class Outcome:
    """A run and what it ran against."""

    info: TargetInfo
    settings: BenchSettings
    result: RunResult
    figures: Figures
    num_planned: int
    """Requests to measure; a run that is stopped sends fewer."""
    load_average: tuple[float, float]
    """Of the machine, over a minute, before and after: other work on it shows here."""
    profile: Profile | None = None
    """Where it was asked for and could be read."""
    profile_failure: str = ""
    """Why it could not be read after the run, of which nothing else is lost by that."""


class Session:
    """Makes one run. `run` and `stop` belong to one event loop."""

    def __init__(
        self,
        settings: BenchSettings,
        target: Target,
        clock: Clock,
        show_progress: ShowProgress,
        profiler: Profiler | None = None,
    ) -> None:
        """`clock` is the one that the target stamps with."""
        self._settings = settings
        self._target = target
        self._show_progress = show_progress
        self._profiler = profiler
        self._runner = Runner(target, clock)
        self._is_measuring = False

    async def run(self) -> Outcome:
        """Look, warm up, run. Raises BenchError where nothing can be measured."""
        settings, runner = self._settings, self._runner
        plan = _plan_of(settings)  # first: a bad file is known before the server is asked
        await self._begin_profile()
        info = await self._target.describe()
        workload = build_workload(plan, await prompt_maker(self._target, settings.seed, settings.prefix_tokens))
        _check_lengths(workload, info)
        if workload.warmup:
            async with self._show_progress(runner, "warm-up"):
                warmed = await runner.run_closed(workload.warmup, settings.concurrency or _WARMUP_CONCURRENCY)
            failed = [record for record in warmed.records if record.status != OK]
            if len(failed) == len(warmed.records):
                raise BenchError(f"every warm-up request failed, with {failed[0].status}: {failed[0].message}")
        await self._begin_profile()
        load_before = os.getloadavg()[0]
        result = await self._measure(workload.measured)
        load = (load_before, os.getloadavg()[0])
        profile, failure = await self._end_profile()
        figures = figures_of(result, settings.objectives)
        return Outcome(info, settings, result, figures, len(workload.measured), load, profile, failure)

    def stop(self) -> bool:
        """Cancel what is live and let `run` return with what has ended; False before anything was measured."""
        if self._is_measuring:
            self._runner.stop()
        return self._is_measuring

    async def _begin_profile(self) -> None:
        if self._profiler is not None:
            await self._profiler.begin()

    async def _end_profile(self) -> tuple[Profile | None, str]:
        """Return the profile, or why there is none."""
        if self._profiler is None:
            return None, ""
        try:
            return await self._profiler.end(), ""
        except BenchError as error:
            return None, str(error)

    async def _measure(self, requests: Sequence[BenchRequest]) -> RunResult:
        # What lives by now lives on: the collector need not walk it while times are taken.
        gc.collect()
        gc.freeze()
        self._is_measuring = True
        try:
            async with self._show_progress(self._runner, "running"):
                if self._settings.concurrency is not None:
                    return await self._runner.run_closed(requests, self._settings.concurrency)
                return await self._runner.run_open(requests)
        finally:
            gc.unfreeze()


async def run_until_stopped(session: Session, stopping: asyncio.Event) -> Outcome | None:
    """Run a session; once `stopping` is set, end it early: with what has ended, or None before anything was measured.

    Raises BenchError.
    """
    running = asyncio.create_task(session.run())
    waiting = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
        if not running.done() and not session.stop():
            running.cancel()
        await asyncio.wait([running])
        return None if running.cancelled() else running.result()
    finally:
        for task in (running, waiting):
            task.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)


def _plan_of(settings: BenchSettings) -> WorkloadPlan:
    return WorkloadPlan(
        input_tokens=settings.input_tokens,
        output_tokens=settings.output_tokens,
        num_requests=settings.num_requests,
        duration=settings.duration,
        rate=settings.rate,
        trace=read_trace(settings.trace) if settings.trace is not None else (),
        prompts=read_prompts(settings.prompts) if settings.prompts is not None else (),
        num_warmup=settings.num_warmup,
        seed=settings.seed,
    )


def _check_lengths(workload: Workload, info: TargetInfo) -> None:
    """Refuse a workload of which the server would refuse a request: its errors would be mistaken for the server's."""
    longest = max(map(_num_tokens, workload.measured))
    if info.max_model_len and longest > info.max_model_len:
        raise BenchError(
            f"the longest request has {longest} tokens with its output, and {info.model} at {info.address} takes "
            f"{info.max_model_len}: lower --input-tokens, --output-tokens or --prefix-tokens"
        )


def _num_tokens(request: BenchRequest) -> int:
    """Return the tokens of a request, of a prompt in text those of the output alone."""
    return request.max_tokens + (0 if isinstance(request.prompt, str) else len(request.prompt))
