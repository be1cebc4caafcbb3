"""What the passes over a model's graph save: time of a step, and memory of its intermediates.

    python bench/fusion.py --json OUT [--rounds N] [--threads N] [--models gpt2,llama] [--without-torch-compile]

Two models of random bfloat16 weights in the shapes of GPT-2 (124M) and SmolLM2-135M (`llama`), each loaded twice, all
passes off and all passes on, with the same kernel set: linear layers are computed by the same kernels on both sides.
A step is one token of each of 1 or 32 rows with 512 tokens of context, from the embedding to the logits; both sides are
recorded as programs, as they are when served. torch.compile (Inductor) is a third side, on the unfused graph: linear
layers, attention and the write of keys and values are the same kernels, all between them is its own. The sides take
turns, a step each, who is first changes from round to round, and a figure is the median over the rounds of
1 - side / off: what disturbs the machine for longer than a round is in all sides.

What share of a step lies outside the linear layers is measured with ops timed one by one, and so is what each kind of
op takes with the passes off and on: steps in turns again, and of each op the median.

Memory is that of the intermediates of a 512-token chunk run op by op, weights and KV excluded, counted as tensors are
made and go: with all passes off (`kept`: nothing is given back before the step ends), with all off but `liveness`
(`freed`: each result goes after its last reader, as in Python code that is written plainly) and with all on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from fusion_models import CONTEXT, SHAPES, FusionModel, Step, make_model
from fusion_torch import compiled_by_torch

from executor_svc.graph.optimize import PASSES, choose_passes
from executor_svc.kernels import KernelSet, build_kernels
from executor_svc.kernels.profiled import OpTimes, profiled
from executor_svc.kernels.record.reference import record

BATCHES = (1, 32)
CHUNK = 512
PROFILED_ROUNDS = 30


@dataclass(frozen=True)
class Saved:
    """The shares of time that a side saved, a round each."""

    shares: tuple[float, ...]

    @classmethod
    def of(cls, off: Sequence[float], side: Sequence[float]) -> Saved:
        """Return what a side saved over `off`, whose steps it took turns with; seconds each."""
        return cls(tuple(sorted(1 - mine / theirs for theirs, mine in zip(off, side, strict=True))))

    @property
    def median(self) -> float:
        """What is told."""
        return statistics.median(self.shares)

    @property
    def quartiles(self) -> tuple[float, float]:
        """How far single rounds lie apart."""
        return self.shares[len(self.shares) // 4], self.shares[3 * len(self.shares) // 4]


def take_turns(sides: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Call all sides in each round, who is first changing from round to round, after three calls of each.

    Return the seconds of each call, by side.
    """
    taken: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides)
    for _ in range(3):
        for call in sides.values():
            call()
    for number in range(rounds):
        turn = number % len(order)
        for name in (*order[turn:], *order[:turn]):
            started = time.perf_counter()
            sides[name]()
            taken[name].append(time.perf_counter() - started)
    return taken


def ops_of(step: Step, sides: Mapping[str, tuple[FusionModel, OpTimes]]) -> dict[str, dict[str, float]]:
    """Return the milliseconds of a step by kind of op, each op timed by itself, for each side."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in sides}

    def run(name: str, step: Step, times: OpTimes) -> None:
        times.clear()
        step.run()
        taken[name].append(dict(times.seconds))

    take_turns(
        {name: partial(run, name, replace(step, model=model), times) for name, (model, times) in sides.items()},
        PROFILED_ROUNDS,
    )
    ops: dict[str, dict[str, float]] = {}
    for name, steps in taken.items():
        medians = {op: statistics.median(seconds[op] for seconds in steps) for op in steps[0]}
        ops[name] = {op: round(seconds * 1e3, 4) for op, seconds in medians.items() if seconds}
    return ops


def figures_of(taken: Mapping[str, Sequence[float]], name: str) -> dict[str, Any]:
    """Return what is written of one side."""
    saved = Saved.of(taken["off"], taken[name])
    return {
        "off_ms": round(statistics.median(taken["off"]) * 1e3, 4),
        "on_ms": round(statistics.median(taken[name]) * 1e3, 4),
        "latency_reduction": round(saved.median, 4),
        "quartiles": [round(each, 4) for each in saved.quartiles],
    }


@dataclass(frozen=True)
class Sides:
    """One shape's model under each side, loaded once for all batches."""

    measured: Mapping[str, FusionModel]
    """off, on, and torch where it is wanted."""
    profiled: Mapping[str, tuple[FusionModel, OpTimes]]
    """none and all: whose ops are timed one by one."""

    @classmethod
    def load(cls, shape: str, kernels: KernelSet, *, with_torch: bool) -> Sides:
        """Draw the weights of each."""
        measured: dict[str, FusionModel] = {
            side: make_model(shape, kernels, choose_passes(passes)) for side, passes in (("off", "none"), ("on", "all"))
        }
        if with_torch:
            measured["torch"] = compiled_by_torch(shape, kernels)
        timed: dict[str, tuple[FusionModel, OpTimes]] = {}
        for passes in ("none", "all"):
            times = OpTimes()
            timed[passes] = make_model(shape, profiled(kernels, times), choose_passes(passes)), times
        return cls(measured, timed)


def compare(sides: Sides, rows: int, rounds: int) -> dict[str, Any]:
    """Measure one model and batch."""
    # One step for all: what they read and write lies in the same pages.
    step = Step.decode(sides.measured["off"], rows)
    taken = take_turns({name: replace(step, model=model).run for name, model in sides.measured.items()}, rounds)
    figures = figures_of(taken, "on")
    if "torch" in taken:
        figures["torch_compile"] = figures_of(taken, "torch")
    ops = ops_of(step, sides.profiled)
    # Of the same run: a share of two runs would have the noise of both.
    figures["share_outside_linears"] = round(1 - ops["none"]["linear"] / sum(ops["none"].values()), 4)
    figures["ops_ms"] = ops
    return figures


def memory_of(shape: str, kernels: KernelSet) -> dict[str, int]:
    """Return the most bytes that the intermediates of a chunk take at once, by what is done about them."""
    from fusion_memory import peak_of

    taken = {}
    op_by_op = replace(kernels, record=record)  # a program lays its buffers out by itself, whatever the passes
    for side, passes in (("kept", "none"), ("freed", "none,liveness"), ("on", "all")):
        model: FusionModel = make_model(shape, op_by_op, choose_passes(passes))
        taken[side] = peak_of(Step.chunk(model, CHUNK).layers)
    return taken


def explained(figures: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Say what the largest reduction consists of: milliseconds saved by kind of op, largest first."""
    largest = max(figures, key=lambda name: figures[name]["latency_reduction"])
    ops = figures[largest]["ops_ms"]
    saved = {op: round(ops["none"].get(op, 0.0) - ops["all"].get(op, 0.0), 4) for op in ops["none"]}
    return {"figure": largest, "saved_ms": dict(sorted(saved.items(), key=lambda each: -each[1]))}


def run(shapes: list[str], threads: int | None, rounds: int, *, with_torch: bool) -> dict[str, Any]:
    """Measure everything."""
    kernels = build_kernels("cpu", threads)
    if threads:
        torch.set_num_threads(threads)
    figures: dict[str, dict[str, Any]] = {}
    for shape in shapes:
        sides = Sides.load(shape, kernels, with_torch=with_torch)
        figures |= {f"{shape}_b{rows}": compare(sides, rows, rounds) for rows in BATCHES}
    memory = {shape: memory_of(shape, kernels) for shape in shapes}
    return {
        "latency_reduction": {name: each["latency_reduction"] for name, each in figures.items()},
        "activation_memory_reduction": round(min(1 - each["on"] / each["kept"] for each in memory.values()), 4),
        "activation_memory_reduction_of_freed": round(
            min(1 - each["on"] / each["freed"] for each in memory.values()), 4
        ),
        "share_outside_linears": {name: each["share_outside_linears"] for name, each in figures.items()},
        "explained": explained(figures),
        "context": CONTEXT,
        "chunk": CHUNK,
        "kernels": kernels.build,
        "passes": [each.name for each in PASSES],
        "figures": figures,
        "activation_bytes": memory,
    }


def main() -> int:
    """Measure, print a table, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file")
    parser.add_argument("--rounds", type=int, default=150, metavar="N", help="steps of each side [default: 150]")
    parser.add_argument("--threads", type=int, metavar="N", help="compute threads [default: all cores]")
    parser.add_argument("--models", default=",".join(SHAPES), help="shapes to measure [default: %(default)s]")
    parser.add_argument("--without-torch-compile", action="store_true", help="leave Inductor out: it compiles minutes")
    args = parser.parse_args()
    with torch.inference_mode():
        figures = run(args.models.split(","), args.threads, args.rounds, with_torch=not args.without_torch_compile)
    print(f"{'':10}{'off ms':>10}{'on ms':>10}{'saved':>9}{'outside linears':>18}{'torch.compile saves':>21}")
    for name, each in figures["figures"].items():
        by_torch = each.get("torch_compile")
        saved = f"{by_torch['latency_reduction']:.1%}" if by_torch else "-"
        print(
            f"{name:10}{each['off_ms']:10.3f}{each['on_ms']:10.3f}{each['latency_reduction']:9.1%}"
            f"{each['share_outside_linears']:18.1%}{saved:>21}"
        )
    for shape, taken in figures["activation_bytes"].items():
        print(
            f"{shape}: intermediates of {CHUNK} tokens: " + ", ".join(f"{k} {v / 1e6:.2f} MB" for k, v in taken.items())
        )
    print(f"the largest, {figures['explained']['figure']}, by kind of op: {figures['explained']['saved_ms']} ms")
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
