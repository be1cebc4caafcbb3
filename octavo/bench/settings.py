"""What the user chose for a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from octavo.bench.figures import OBJECTIVES
from octavo.bench.target import GenerationOptions
from octavo.bench.workload import Lengths


@dataclass(frozen=True)
class BenchSettings:
    """One run. Exactly one of `concurrency`, `rate` and `trace` is not None."""

    options: GenerationOptions
    concurrency: int | None
    """Requests kept live, in a closed loop."""
    rate: float | None
    """Poisson arrivals a second, in an open loop."""
    trace: Path | None
    """File of arrivals, in an open loop."""
    num_requests: int | None
    duration: float | None
    """Seconds of arrivals; with `rate` only."""
    input_tokens: Lengths
    output_tokens: Lengths
    prefix_tokens: int = 0
    prompts: Path | None = None
    num_warmup: int = 0
    seed: int = 0
    objectives: Mapping[str, float] = field(default_factory=dict)
    """Limits in seconds by name, for goodput."""

    def describe_load(self) -> str:
        """Return the load in words."""
        if self.trace is not None:
            return f"open loop, arrivals of {self.trace}"
        if self.rate is not None:
            return f"open loop, Poisson arrivals, {self.rate:g} requests/s"
        return f"closed loop, {self.concurrency} at once"

    def describe_prompts(self) -> str:
        """Return the requests in words."""
        what = f"prompts of {self.prompts}, " if self.prompts is not None else ""
        what += f"input {self.input_tokens} tokens"
        if self.prefix_tokens:
            what += f" after a shared prefix of {self.prefix_tokens}"
        if self.prompts is not None or self.trace is not None:
            what += " where the file has no prompt"
        eos = "end of sequence ignored" if self.options.ignore_eos else "may end sooner"
        return (
            f"{what}, output {self.output_tokens} ({eos}), temperature {self.options.temperature:g}, seed {self.seed}"
        )


def parse_objectives(text: str) -> dict[str, float]:
    """Return limits in seconds by name, from `ttft=200ms,itl=0.05s`. Raises ValueError with what is wanted."""
    limits = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in OBJECTIVES:
            raise ValueError(f"{name!r} is no objective; there are {', '.join(OBJECTIVES)}, as in ttft=200ms,itl=50ms")
        number, scale = (value[:-2], 0.001) if value.endswith("ms") else (value[:-1], 1.0)
        try:
            limit = float(number) * scale
        except ValueError:
            limit = 0.0
        if not (value.endswith("s") and 0 < limit < float("inf")):
            raise ValueError(f"{name}={value}: must be a time above 0 with its unit, such as 200ms or 1.5s")
        limits[name] = limit
    return limits
