"""What it costs and saves to divide a model among ranks: time of a decode step, and what of it is spent together.

    python bench/tensor_parallel.py [--ranks 1,2] [--rows 1,16,64] [--steps N] [--layers N] [--json OUT]

A model of random bfloat16 weights in the shape of a 1B Llama, with fewer layers, is run by executors of so many ranks,
as processes on this machine that divide its cores, with 512 tokens of context: from the embedding to the likeliest
tokens, as greedy decoding runs it. `step_ms` is the median; `op_by_op_ms` the same with steps that are not recorded;
`sums_ms` what one step's sums take by themselves, so where nobody waits for another's computing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from fusion_models import CPU, RandomCheckpoint, Step

from executor_svc.kernels import KernelSet, build_kernels
from executor_svc.models import CausalLM
from executor_svc.models.loader import load_checkpoint
from executor_svc.parallel.connect import connect
from executor_svc.parallel.lead import ConnectedRanks, Follower, LeadingModel
from executor_svc.parallel.messages import Kind
from executor_svc.parallel.place import Place, find_place, take_cores
from octavo.settings import ExecutorSettings

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}


@dataclass(frozen=True)
class Options:
    """What every rank is told."""

    rows: list[int]
    steps: int
    layers: int


class _Leading(LeadingModel):
    """Rank 0's, with the config that Step asks for."""

    def __init__(self, model: CausalLM, ranks: ConnectedRanks) -> None:
        super().__init__(model, ranks)
        self.config = model.config


def run_rank(place: Place | None, threads: int, options: Options) -> dict[str, Any]:
    """Return rank 0's figures, by rows; nothing on the others."""
    torch.set_num_threads(threads)
    kernels = build_kernels("cpu", threads)
    ranks = None if place is None else connect(place, {}, in_order=True)
    found: dict[str, Any] = {}
    for name, each in (("step_ms", kernels), ("op_by_op_ms", replace(kernels, record=lambda body: body))):
        for rows, seconds in _measure(each, ranks, options).items():
            found.setdefault(str(rows), {})[name] = 1000 * seconds
    if ranks is None:
        return found
    for rows in options.rows:
        seconds = _time(partial(_sums, ranks, rows, options.layers), options.steps)
        found.setdefault(str(rows), {})["sums_ms"] = 1000 * seconds
    ranks.group.least(0)
    ranks.watch.finish()
    return found


def _measure(kernels: KernelSet, ranks: ConnectedRanks | None, options: Options) -> dict[int, float]:
    """Return the seconds of a step by rows; nothing on other ranks than the first."""
    checkpoint = RandomCheckpoint.of({**SHAPE, "num_hidden_layers": options.layers})
    model = load_checkpoint(checkpoint, torch.bfloat16, CPU, kernels, ranks=ranks)
    torch.set_num_threads(1)
    found = {}
    for rows in options.rows:
        if ranks is not None and ranks.share.rank:
            # A step's own KV memory has the rank's heads; its inputs come from rank 0.
            Follower(model, Step.decode(model, rows).kv_cache, ranks).follow()
            continue
        leading = model if ranks is None else _Leading(model, ranks)
        step = Step.decode(leading, rows)
        with torch.inference_mode():
            found[rows] = _time(partial(_greedy, leading, step), options.steps)
        if ranks is not None:
            ranks.watch.tell(Kind.END)
    return found


def _greedy(model: CausalLM | _Leading, step: Step) -> None:
    model.likeliest(step.layers()[step.last])


def _sums(ranks: ConnectedRanks, rows: int, layers: int) -> None:
    x = torch.zeros(rows, SHAPE["hidden_size"], dtype=torch.bfloat16)
    for _ in range(2 * layers + 1):
        ranks.sum(x)


def _time(call: Callable[[], object], steps: int) -> float:
    """Return the median seconds of a call, after three that warm up."""
    times = []
    for _ in range(3 + steps):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times[3:])


def measure(size: int, options: Options) -> dict[str, Any]:
    """Return the figures of so many ranks, the others started as processes."""
    settings = ExecutorSettings(model="random", tensor_parallel=size)
    place = find_place(settings, {})
    if place is None:
        return run_rank(None, len(os.sched_getaffinity(0)), options)
    command = [sys.executable, __file__, "--ranks", str(size), *_flags(options)]
    others = [
        subprocess.Popen(command, env={**os.environ, **place.variables(rank)}, stdout=subprocess.DEVNULL)
        for rank in range(1, size)
    ]
    cores = os.sched_getaffinity(0)
    try:
        return run_rank(place, take_cores(settings, place).threads or 1, options)
    finally:
        os.sched_setaffinity(0, cores)
        for each in others:
            each.wait()


def _flags(options: Options) -> list[str]:
    rows = ",".join(map(str, options.rows))
    return ["--rows", rows, "--steps", str(options.steps), "--layers", str(options.layers)]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, with commas")
    parser.add_argument("--rows", default="1,16,64", help="sequences of a step, with commas")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--json", metavar="OUT")
    args = parser.parse_args()
    options = Options([int(each) for each in args.rows.split(",")], args.steps, args.layers)
    sizes = [int(each) for each in args.ranks.split(",")]
    if "RANK" in os.environ:
        settings = ExecutorSettings(model="random", tensor_parallel=sizes[0])
        place = find_place(settings, os.environ)
        assert place is not None
        run_rank(place, take_cores(settings, place).threads or 1, options)
        os._exit(0)  # as the executor ends: gloo's threads may outlive what they belong to, which ends in abort()
    figures: dict[str, Any] = {"layers": options.layers, "ranks": {}}
    print(f"{'ranks':>5} {'rows':>5} {'step ms':>9} {'op by op':>9} {'sums':>9}")
    for size in sizes:
        found = figures["ranks"][str(size)] = measure(size, options)
        for rows, times in found.items():
            columns = [times.get(name) for name in ("step_ms", "op_by_op_ms", "sums_ms")]
            shown = " ".join(f"{'' if each is None else f'{each:.2f}':>9}" for each in columns)
            print(f"{size:>5} {rows:>5} {shown}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
