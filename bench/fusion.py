"""What the passes over a model's graph save: time of a step, and memory of its intermediates.

    python bench/fusion.py --json OUT [--pairs N] [--threads N] [--models gpt2,llama] [--without-torch-compile]

Two models of random bfloat16 weights in the shapes of GPT-2 (124M) and SmolLM2-135M (`llama`), each loaded twice, all
passes off and all passes on, with the same kernel set: linear layers are computed by the same kernels on both sides.
A step is one token of each of 1 or 32 rows with 512 tokens of context, from the embedding to the logits; both sides are
recorded as programs, as they are when served. Steps of the two sides alternate, who is first alternates too, and a
figure is the median over the pairs of 1 - on / off.

torch.compile (Inductor) is measured in the same way, on the unfused graph: linear layers, attention and the write of
keys and values are the same kernels, all between them is its own. What share of a step lies outside the linear layers
is measured with ops timed one by one, and so is what each kind of op takes on each side.

Memory is that of the intermediates of a 512-token chunk, weights and KV excluded, counted as tensors are made and go:
with all passes off (`kept`: nothing is given back before the step ends), with all off but `liveness` (`freed`: each
result goes after its last reader, as in Python code that is written plainly) and with all on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from fusion_models import CONTEXT, SHAPES, FusionModel, Step, make_model
from fusion_torch import compiled_by_torch

from executor_svc.graph.optimize import PASSES, choose_passes
from executor_svc.kernels import KernelSet, build_kernels
from executor_svc.kernels.profiled import OpTimes, profiled

BATCHES = (1, 32)
CHUNK = 512
PROFILED_STEPS = 20


@dataclass(frozen=True)
class Pairs:
    """Seconds of steps that were taken in turns."""

    off: list[float]
    on: list[float]

    @property
    def reduction(self) -> float:
        """Median over the pairs of the share of time that is saved."""
        return statistics.median(1 - on / off for off, on in zip(self.off, self.on, strict=True))

    @property
    def spread(self) -> tuple[float, float]:
        """Quartiles of the same."""
        shares = sorted(1 - on / off for off, on in zip(self.off, self.on, strict=True))
        return shares[len(shares) // 4], shares[3 * len(shares) // 4]


def measure_pairs(off: Callable[[], object], on: Callable[[], object], pairs: int) -> Pairs:
    """Call both in turns, who is first changing from pair to pair, after three calls of each."""
    for _ in range(3):
        off()
        on()
    taken = Pairs([], [])
    for pair in range(pairs):
        sides = [(off, taken.off), (on, taken.on)]
        for call, seconds in sides if pair % 2 else sides[::-1]:
            started = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - started)
    return taken


def ops_of(shape: str, passes: str, rows: int, kernels: KernelSet) -> dict[str, float]:
    """Return the milliseconds of a step by kind of op, each op timed by itself."""
    times = OpTimes()
    model = make_model(shape, profiled(kernels, times), choose_passes(passes))
    step = Step.decode(model, rows)
    for _ in range(3):
        step.run()
    times.clear()
    for _ in range(PROFILED_STEPS):
        step.run()
    return {op: seconds / PROFILED_STEPS * 1e3 for op, seconds in times.seconds.items() if seconds}


def figures_of(name: str, pairs: Pairs) -> dict[str, Any]:
    """Return what is written of one comparison."""
    low, high = pairs.spread
    return {
        "off_ms": round(statistics.median(pairs.off) * 1e3, 4),
        f"{name}_ms": round(statistics.median(pairs.on) * 1e3, 4),
        "latency_reduction": round(pairs.reduction, 4),
        "quartiles": [round(low, 4), round(high, 4)],
    }


def compare(shape: str, rows: int, kernels: KernelSet, pairs: int, *, with_torch: bool) -> dict[str, Any]:
    """Measure one model and batch."""
    off, on = (make_model(shape, kernels, choose_passes(passes)) for passes in ("none", "all"))
    steps = [Step.decode(model, rows) for model in (off, on)]
    figures = figures_of("on", measure_pairs(steps[0].run, steps[1].run, pairs))
    if with_torch:
        by_torch = Step.decode(compiled_by_torch(shape, kernels), rows)
        figures["torch_compile"] = figures_of("on", measure_pairs(steps[0].run, by_torch.run, pairs))
    ops = {side: ops_of(shape, side, rows, kernels) for side in ("none", "all")}
    # Of the same run: a share of two runs would have the noise of both.
    figures["share_outside_linears"] = round(1 - ops["none"]["linear"] / sum(ops["none"].values()), 4)
    figures["ops_ms"] = {side: {op: round(value, 4) for op, value in taken.items()} for side, taken in ops.items()}
    return figures


def memory_of(shape: str, kernels: KernelSet) -> dict[str, int]:
    """Return the most bytes that the intermediates of a chunk take at once, by what is done about them."""
    from fusion_memory import peak_of

    taken = {}
    for side, passes in (("kept", "none"), ("freed", "none,liveness"), ("on", "all")):
        model: FusionModel = make_model(shape, kernels, choose_passes(passes))
        taken[side] = peak_of(Step.chunk(model, CHUNK).layers)
    return taken


def explained(figures: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Say what the largest reduction consists of: milliseconds saved by kind of op, largest first."""
    largest = max(figures, key=lambda name: figures[name]["latency_reduction"])
    ops = figures[largest]["ops_ms"]
    saved = {op: round(ops["none"].get(op, 0.0) - ops["all"].get(op, 0.0), 4) for op in ops["none"]}
    return {"figure": largest, "saved_ms": dict(sorted(saved.items(), key=lambda each: -each[1]))}


def run(shapes: list[str], threads: int | None, pairs: int, *, with_torch: bool) -> dict[str, Any]:
    """Measure everything."""
    kernels = build_kernels("cpu", threads)
    if threads:
        torch.set_num_threads(threads)
    figures = {
        f"{shape}_b{rows}": compare(shape, rows, kernels, pairs, with_torch=with_torch)
        for shape in shapes
        for rows in BATCHES
    }
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
    parser.add_argument("--pairs", type=int, default=200, metavar="N", help="steps of each side [default: 200]")
    parser.add_argument("--threads", type=int, metavar="N", help="compute threads [default: all cores]")
    parser.add_argument("--models", default=",".join(SHAPES), help="shapes to measure [default: %(default)s]")
    parser.add_argument("--without-torch-compile", action="store_true", help="leave Inductor out: it compiles minutes")
    args = parser.parse_args()
    with torch.inference_mode():
        figures = run(args.models.split(","), args.threads, args.pairs, with_torch=not args.without_torch_compile)
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
