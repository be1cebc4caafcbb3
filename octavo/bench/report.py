"""Figures as a table for a person."""

from __future__ import annotations

import os

from octavo.bench.figures import Distribution, Figures
from octavo.bench.profile import Profile
from octavo.bench.session import Outcome
from octavo.terminal.style import printable
from octavo.terminal.table import table

LAG_LIMIT = 0.010
"""Seconds of lag, at the 99th percentile, above which the generator counts as behind."""
CPU_LIMIT = 0.8
"""Share of a core above which the generator's own work may be what is measured."""
_STEPS_UNDER_WAY = 8
"""As many as a scheduler ever has unanswered at one executor."""
_COLUMNS = ("mean", "p50", "p90", "p99", "max")
_LABEL_WIDTH = 24


def report(outcome: Outcome) -> str:
    """Return the whole table, without a line end at the end."""
    figures, settings, info = outcome.figures, outcome.settings, outcome.info
    revision = f", revision {info.revision[:12]}" if info.revision else ""
    num_sent = len(outcome.result.records)
    sent = f"{num_sent} of {outcome.num_planned}" if outcome.result.was_stopped else str(num_sent)
    lines = [
        f"{info.model}{revision}, {info.api} over {info.protocol} at {info.address}",
        f"{settings.describe_load()}; {sent} requests, {settings.num_warmup} before to warm up",
        settings.describe_prompts(),
        "",
        _latencies(figures),
        "",
        *_totals(figures),
    ]
    if outcome.profile is not None:
        lines += ["", *_profile(outcome.profile)]
    if notes := notes_on(outcome):
        lines += ["", *(f"note: {note}" for note in notes)]
    # A server chooses the names of its model and of its errors.
    return printable("\n".join(lines))


def notes_on(outcome: Outcome) -> list[str]:
    """Return what a reader must know before believing the figures."""
    figures, settings = outcome.figures, outcome.settings
    notes = []
    if outcome.result.was_stopped:
        num_ended = figures.num_ok + figures.num_failed
        notes.append(
            f"stopped early, with {num_ended} ended and {figures.num_cancelled} live: the figures are of the former, "
            "the latter were cancelled"
        )
    profile = outcome.profile
    if outcome.profile_failure:
        notes.append(outcome.profile_failure)
    # A result may be under way at either end.
    if profile is not None and profile.num_scheduled > profile.num_steps + _STEPS_UNDER_WAY:
        notes.append(
            f"the scheduler ran {profile.num_scheduled} steps and the executors that were read {profile.num_steps}: "
            "name all of the cell with --executor-metrics"
        )
    num_cpus, load = len(os.sched_getaffinity(0)), outcome.load_average[0]
    if load > num_cpus:
        notes.append(f"this machine was busy before the run: a load average of {load:.1f} on {num_cpus} CPUs")
    if figures.lag is not None and figures.lag.p99 > LAG_LIMIT:
        notes.append(
            f"the generator fell behind its own schedule: p99 {_ms(figures.lag.p99)} ms, at worst "
            f"{_ms(figures.lag.max)} ms late. Latencies count from the schedule and contain this"
        )
    if figures.cpu_share > CPU_LIMIT:
        notes.append(
            f"the generator used {100 * figures.cpu_share:.0f}% of a core: part of the latency may be its own; "
            "lower the load or run it on another machine"
        )
    if figures.num_counted_as_deliveries:
        notes.append(
            f"no usage from the server for {figures.num_counted_as_deliveries} of {figures.num_ok} requests: their "
            "output tokens are a count of stream chunks"
        )
    if figures.num_without_prompt_count:
        notes.append(
            f"no count of input tokens for {figures.num_without_prompt_count} of {figures.num_ok} requests: they are "
            "missing above"
        )
    if figures.tokens_per_delivery > 1.01:
        notes.append(
            f"tokens came {figures.tokens_per_delivery:.2f} at a time: inter-token latency is the wait between "
            "deliveries, time per output token is per token"
        )
    if figures.num_short and settings.options.ignore_eos:
        notes.append(f"{figures.num_short} of {figures.num_ok} requests got fewer tokens than they asked for")
    return notes


def _latencies(figures: Figures) -> str:
    samples = {
        "time to first token": figures.ttft,
        "inter-token latency": figures.itl,
        "time per output token": figures.tpot,
        "end to end": figures.e2e,
    }
    # A label as wide as those below, so that the columns line up.
    head = ["milliseconds".ljust(_LABEL_WIDTH - 2), *_COLUMNS]
    rows = [[label, *_cells(sample)] for label, sample in samples.items()]
    return table(head, rows, align="l" + "r" * len(_COLUMNS))


def _cells(sample: Distribution | None) -> list[str]:
    return ["-" if sample is None else _ms(getattr(sample, column)) for column in _COLUMNS]


def _totals(figures: Figures) -> list[str]:
    errors = "".join(f"; {count} {code}" for code, count in figures.errors.items())
    rows = [
        ("requests", f"{figures.num_ok} ok, {figures.num_failed} failed{errors}"),
        ("duration", f"{figures.duration:.2f} s, {figures.mean_concurrency:.1f} requests in flight on average"),
        ("throughput", f"{figures.request_rate:.2f} requests/s"),
        ("output tokens", f"{figures.output_tokens}, {figures.output_token_rate:.1f} a second"),
        (
            "input and output",
            f"{figures.prompt_tokens + figures.output_tokens} tokens, {figures.total_token_rate:.1f} a second",
        ),
    ]
    if figures.goodput is not None:
        limits = ", ".join(f"{name} {_ms(limit)} ms" for name, limit in figures.goodput.objectives.items())
        rows.append(
            (
                "goodput",
                f"{figures.goodput.request_rate:.2f} requests/s, {100 * figures.goodput.share:.1f}% within {limits}",
            )
        )
    if figures.lag is not None:
        rows.append(("sent late by", f"{_ms(figures.lag.mean)} ms mean, {_ms(figures.lag.p99)} ms p99"))
    rows.append(
        (
            "generator",
            f"{1e6 * figures.cpu_per_token:.0f} us of CPU a token, {100 * figures.cpu_share:.0f}% of a core",
        )
    )
    return [f"{label:{_LABEL_WIDTH}}{text}" for label, text in rows]


def _profile(profile: Profile) -> list[str]:
    """Return the parts of a step on the device, which add up to it, and those beside it, which do not."""
    whole = profile.seconds
    head = ["milliseconds a step", "mean", "share"]
    rows = [[part, f"{1000 * seconds:.3f}", f"{seconds / whole:.1%}"] for part, seconds in profile.device.items()]
    rows.append(["whole step", f"{1000 * whole:.3f}", ""])
    rows += [[f"beside it: {part}", f"{1000 * seconds:.3f}", ""] for part, seconds in profile.around.items()]
    size = f"of {profile.num_sequences:.1f} sequences and {profile.num_tokens:.1f} tokens on average"
    return [*table(head, rows, align="lrr").splitlines(), f"{'steps':{_LABEL_WIDTH}}{profile.num_steps}, {size}"]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"
