"""What is sent, and when: lengths, files of prompts, traces. Pure and seeded but for the reading of files.

A prompts file has a prompt a line, or, where its name ends in .jsonl, a JSON object a line. A trace is always of the
latter kind and has an `arrival` on every line:

    {"arrival": 0.25, "prompt": "Once upon a time", "max_tokens": 64}
    {"arrival": 0.75, "prompt_tokens": 512, "max_tokens": 32}

arrival        seconds after the start, at least 0; lines may be in any order
prompt         the text; or
prompt_tokens  a length, for which a prompt is made up
max_tokens     most tokens to generate; without it --output-tokens decides, and without either prompt, --input-tokens
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from octavo.bench.arrivals import poisson_arrivals
from octavo.bench.prompts import PromptMaker
from octavo.bench.records import BenchError, BenchRequest

MOST_TOKENS = 10_000_000
MOST_REQUESTS = 10_000_000
LONGEST_SECONDS = 1e9
"""Some thirty years; clocks and timers hold no much longer time."""
_WARMUP_TOKENS = 16


class Lengths:
    """A fixed number of tokens or a distribution of them: `128`, `64-256` (uniform), `normal:256,64`,
    `lognormal:256,0.5` (median, sigma of the logarithm).
    """

    def __init__(self, text: str) -> None:
        """Raises ValueError with what is wanted."""
        self._text = text
        self._kind, self._first, self._second = _parse_lengths(text)

    def __str__(self) -> str:
        return self._text

    def draw(self, generator: random.Random) -> int:
        """Return a length, at least 1."""
        match self._kind:
            case "uniform":
                return generator.randint(int(self._first), int(self._second))
            case "normal":
                drawn = generator.gauss(self._first, self._second)
            case _:
                try:
                    drawn = generator.lognormvariate(math.log(self._first), self._second)
                except OverflowError:  # a wide one has draws that no number holds
                    drawn = math.inf
        return round(min(max(1, drawn), MOST_TOKENS))


def _parse_lengths(text: str) -> tuple[str, float, float]:
    wanted = "a number of tokens, LEAST-MOST, normal:MEAN,DEVIATION or lognormal:MEDIAN,SIGMA"
    kind, _, numbers = text.rpartition(":")
    try:
        if kind:
            first, second = (float(number) for number in numbers.split(","))
        else:
            least, _, most = numbers.partition("-")
            kind, first, second = "uniform", float(int(least)), float(int(most or least))
    except ValueError:
        raise ValueError(wanted) from None
    in_order = first <= second or kind != "uniform"
    if kind not in ("uniform", "normal", "lognormal") or not (1 <= first <= MOST_TOKENS and second >= 0 and in_order):
        raise ValueError(wanted)
    if not math.isfinite(second):
        raise ValueError(wanted)
    return kind, first, second


@dataclass(frozen=True)
class Entry:
    """A line of a prompts file or trace. What is None is made up."""

    prompt: str | None = None
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    arrival: float | None = None


@dataclass(frozen=True)
class WorkloadPlan:
    """Which requests to make. At most one of `rate` and `trace`; with neither, nothing has an arrival time."""

    input_tokens: Lengths
    output_tokens: Lengths
    num_requests: int | None = None
    """Of a trace: its first ones. Beside `duration`: whichever ends first."""
    duration: float | None = None
    rate: float | None = None
    trace: Sequence[Entry] = ()
    prompts: Sequence[Entry] = ()
    """Taken in turn, from the first again after the last."""
    num_warmup: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Workload:
    """The requests of a run: those to warm up with, and those to measure, by arrival."""

    warmup: list[BenchRequest]
    measured: list[BenchRequest]


def build_workload(plan: WorkloadPlan, prompts: PromptMaker) -> Workload:
    """Return the requests. The measured ones do not depend on the number of warm-up ones. Raises BenchError."""
    arrivals: Sequence[float | None]
    if plan.rate is not None and plan.num_requests is None and plan.rate * (plan.duration or 0.0) > MOST_REQUESTS:
        raise BenchError(f"--rate, --duration: more than {MOST_REQUESTS} requests: lower one, or give --requests")
    if plan.trace:
        entries = sorted(plan.trace, key=lambda entry: entry.arrival or 0.0)[: plan.num_requests]
        arrivals = [entry.arrival for entry in entries]
    else:
        if plan.rate is not None:
            arrivals = poisson_arrivals(
                plan.rate, seed=plan.seed, num_requests=plan.num_requests, duration=plan.duration
            )
        else:
            assert plan.num_requests is not None
            arrivals = [None] * plan.num_requests
        entries = list(islice(cycle(plan.prompts or [Entry()]), len(arrivals)))
    if not arrivals:
        raise BenchError(
            f"no request arrives within {plan.duration:g} s at {plan.rate:g} a second: raise --rate or --duration"
        )
    measured = []
    for index, (entry, arrival) in enumerate(zip(entries, arrivals, strict=True)):
        # Of its own generator, and drawn whether used or not: what a file says of a request changes no other one.
        own = random.Random(f"{plan.seed}/{index}")
        drawn_input, drawn_output = plan.input_tokens.draw(own), plan.output_tokens.draw(own)
        prompt = entry.prompt if entry.prompt is not None else prompts.make(own, entry.prompt_tokens or drawn_input)
        measured.append(BenchRequest(prompt, entry.max_tokens or drawn_output, arrival))
    # Of their own stream and text: what warms the server must not fill its prefix cache with what is measured.
    generator = random.Random(f"{plan.seed}/warmup")
    warmup = []
    for _ in range(plan.num_warmup):
        prompt = prompts.make(generator, plan.input_tokens.draw(generator))
        warmup.append(BenchRequest(prompt, min(_WARMUP_TOKENS, plan.output_tokens.draw(generator))))
    return Workload(warmup, measured)


def read_prompts(path: Path) -> list[Entry]:
    """Return the lines of a prompts file. Raises BenchError with file, line and field."""
    lines = _lines_of(path, "--prompts")
    if path.suffix == ".jsonl":
        entries = _parse_entries(path, lines, needs_arrival=False)
    else:
        entries = [Entry(prompt=line) for line in lines if line.strip()]
    if not entries:
        raise BenchError(f"--prompts: {path} has no prompt")
    return entries


def read_trace(path: Path) -> list[Entry]:
    """Return the lines of a trace. Raises BenchError with file, line and field."""
    entries = _parse_entries(path, _lines_of(path, "--trace"), needs_arrival=True)
    if not entries:
        raise BenchError(f"--trace: {path} has no request")
    return entries


def _lines_of(path: Path, flag: str) -> list[str]:
    try:
        # Not splitlines(), for which other characters end a line too; a prompt may hold them.
        return path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise BenchError(f"{flag}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BenchError(f"{flag}: {path} is not UTF-8 text") from None


def _parse_entries(path: Path, lines: Iterable[str], *, needs_arrival: bool) -> list[Entry]:
    entries = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                entries.append(_parse_entry(line, needs_arrival=needs_arrival))
            except ValueError as error:
                raise BenchError(f"{path} line {number}: {error}") from None
    return entries


def _parse_entry(line: str, *, needs_arrival: bool) -> Entry:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    except RecursionError:
        raise ValueError("not JSON of this kind: it is nested too deep") from None
    if not isinstance(fields, dict):
        raise ValueError("must be a JSON object")
    known = {"prompt", "prompt_tokens", "max_tokens", "arrival"}
    if unknown := sorted(fields.keys() - known):
        raise ValueError(f"{unknown[0]}: no such field; there are {', '.join(sorted(known))}")
    if "prompt" in fields and "prompt_tokens" in fields:
        raise ValueError("prompt, prompt_tokens: give one of them")
    if needs_arrival and "arrival" not in fields:
        raise ValueError("arrival: is missing")
    prompt = fields.get("prompt")
    if prompt is not None and not (isinstance(prompt, str) and prompt and _is_unicode(prompt)):
        raise ValueError("prompt: must be text")
    return Entry(
        prompt,
        _count(fields, "prompt_tokens"),
        _count(fields, "max_tokens"),
        _seconds(fields, "arrival") if needs_arrival else None,
    )


def _is_unicode(text: str) -> bool:
    """JSON can write half a surrogate pair, which no encoding of Unicode can."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _count(fields: dict[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is not None and not (type(value) is int and 1 <= value <= MOST_TOKENS):
        raise ValueError(f"{name}: must be a whole number from 1 to {MOST_TOKENS}")
    return value


def _seconds(fields: dict[str, Any], name: str) -> float:
    value = fields[name]
    if type(value) not in (int, float) or not 0 <= value <= LONGEST_SECONDS:
        raise ValueError(f"{name}: must be a number of seconds, from 0 to {LONGEST_SECONDS:.0f}")
    return float(value)
