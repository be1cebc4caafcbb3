"""The floor of a workload: what it would take if only memory and multipliers took time: python bench/floor.py.

A step takes the longer of two times: the bytes it reads and writes over the measured read bandwidth, and its operations
over the measured peak rate of matrix products. A run is the sum of its steps, as an ideal scheduler would make them.

What counts as bytes: every weight of the layers once a step, at the smaller size of the type that is served and of the
checkpoint's (float32 arithmetic needs no more than the 2 bytes that hold a bfloat16 exactly); the output head once a
step in which any row samples; the embedding of each token; the keys and values of each row's context, read once a
chunk, and the new ones, written once. A shared prefix is read once a step by all rows together.
What counts as operations: two for each weight and token in the layers; two for each weight of the head and row that
samples; four for each head, dimension and attended position in the attention. Everything else is free: norms, rotary,
softmax, sampling, the services between.

The ideal scheduler knows every length ahead. Sequences that are there decode one token a step; what is left of the
step's tokens goes to prompts, those with the longest outputs first. A shared prefix is computed once. Of several sizes
of a step the best one counts. Memory for keys and values has no end.

What the floor is not: a bound for weights that stay in a cache (a last-level cache larger than the weights lets a step
read faster than memory), nor for fewer bits per weight than are served, nor for multipliers that torch does not reach.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import limits as machine_limits
import make_models
import workloads
from limits import Limits
from workloads import Workload

STEP_SIZES = (64, 128, 192, 256, 384, 512, 1024, 2048, 1 << 30)
"""Most tokens in a step; the best of these counts."""
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Shape:
    """A model of the Llama family, as far as bytes and operations go. `body` and `head` are numbers of weights."""

    body: int
    head: int
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, folder: Path) -> Shape:
        """Read config.json of a Hugging Face folder. Raises OSError, KeyError."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
        kv_heads, head_dim = config.get("num_key_value_heads", heads), config.get("head_dim") or hidden // heads
        attention = 2 * hidden * head_dim * (heads + kv_heads)
        return cls(
            body=layers * (attention + 3 * hidden * config["intermediate_size"] + 2 * hidden) + hidden,
            head=config["vocab_size"] * hidden,
            hidden=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
        )

    def kv_elements(self) -> int:
        """Return the elements of one token's keys and values, all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class Cost:
    """How long a step takes at least: for a model, the bytes of an element of its weights and KV, and a machine."""

    shape: Shape
    weight_bytes: int
    kv_bytes: int
    limits: Limits

    @classmethod
    def of(cls, folder: Path, dtype: str, limits: Limits) -> Cost:
        """Return the cost of serving a Hugging Face folder in `dtype`. Raises OSError, KeyError."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        stored = config.get("dtype") or config.get("torch_dtype") or dtype
        size = DTYPE_BYTES[dtype]
        return cls(Shape.of(folder), min(size, DTYPE_BYTES[stored]), size, limits)

    def step(self, *, tokens: int, samples: int, kv_read: int, kv_written: int, attended: int) -> float:
        """Return the seconds of a step. `kv_read`, `kv_written`: positions; `attended`: pairs of token and position."""
        shape = self.shape
        weights = shape.body + (shape.head if samples else 0) + tokens * shape.hidden
        moved = weights * self.weight_bytes + (kv_read + kv_written) * shape.kv_elements() * self.kv_bytes
        operations = 2 * shape.body * tokens + 2 * shape.head * samples
        operations += 4 * shape.num_layers * shape.num_heads * shape.head_dim * attended
        return max(moved / self.limits.read_bandwidth, operations / self.limits.peak_rate)


@dataclass(frozen=True)
class FloorRun:
    """The ideal run. Times in seconds; `ttft`, `tpot` and `e2e` are means over requests, from their arrivals."""

    total: float
    ttft: float
    tpot: float
    e2e: float
    num_steps: int
    step_size: int


@dataclass
class _Live:
    """A request under way: tokens of its prompt to compute, output to make, and when what came."""

    num_prompt: int
    num_output: int
    arrival: float
    num_computed: int
    num_made: int = 0
    first: float = 0.0
    last: float = 0.0

    @property
    def is_decoding(self) -> bool:
        return self.num_made > 0


def floor_of(workload: Workload, cost: Cost) -> FloorRun:
    """Return the ideal run of a workload: of the sizes of a step, the one that ends first."""
    return min((simulate(workload, cost, size) for size in STEP_SIZES), key=lambda run: (run.total, run.e2e))


def simulate(workload: Workload, cost: Cost, step_size: int) -> FloorRun:
    """Return the run in which a step has at most `step_size` tokens; decoding rows always find room."""
    shared = workload.num_shared
    lives = [
        # The first one computes what is shared; the others find it there.
        _Live(len(each.prompt), each.num_output_tokens, each.arrival, num_computed=shared if index else 0)
        for index, each in enumerate(workload.requests)
    ]
    pending = sorted(lives, key=lambda live: (live.arrival, -live.num_output))
    now, num_steps = 0.0, 0
    live: list[_Live] = []
    while pending or live:
        if not live:
            now = max(now, pending[0].arrival)
        while pending and pending[0].arrival <= now:
            live.append(pending.pop(0))
        now += _step(live, shared, cost, step_size)
        num_steps += 1
        for each in live:
            if each.is_decoding:
                each.first = each.first or now
                each.last = now
        live = [each for each in live if each.num_made < each.num_output]
    return FloorRun(
        total=now,
        ttft=fmean(each.first - each.arrival for each in lives),
        tpot=fmean((each.last - each.first) / max(1, each.num_output - 1) for each in lives),
        e2e=fmean(each.last - each.arrival for each in lives),
        num_steps=num_steps,
        step_size=step_size,
    )


def _step(live: list[_Live], shared: int, cost: Cost, step_size: int) -> float:
    """Move every row that takes part on, and return the seconds of the step."""
    tokens = samples = kv_read = attended = 0
    reads_shared = False
    for row in (each for each in live if each.is_decoding):
        context = row.num_prompt + row.num_made
        tokens, samples = tokens + 1, samples + 1
        kv_read, attended, reads_shared = kv_read + context - 1 - shared, attended + context, True
        row.num_made += 1
    for row in (each for each in live if each.num_computed < each.num_prompt):
        chunk = min(row.num_prompt - row.num_computed, step_size - tokens)
        if chunk <= 0:
            break
        past = row.num_computed
        tokens += chunk
        kv_read += max(0, past - shared)
        attended += chunk * past + chunk * (chunk + 1) // 2
        reads_shared = reads_shared or past > 0
        row.num_computed += chunk
        if row.num_computed == row.num_prompt:
            row.num_made, samples = 1, samples + 1
    kv_read += shared if reads_shared else 0
    return cost.step(tokens=tokens, samples=samples, kv_read=kv_read, kv_written=tokens, attended=attended)


def main() -> int:
    """Measure the machine, print the floors of every workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=make_models.SMOLLM2, help="name or folder [default: %(default)s]")
    parser.add_argument(
        "--dtype", choices=sorted(DTYPE_BYTES), default="bfloat16", help="what is served [default: %(default)s]"
    )
    parser.add_argument("--rate", type=float, default=workloads.RATE, help="arrivals of W4 [default: %(default)s]")
    args = parser.parse_args()
    limits = machine_limits.measure_apart()
    cost = Cost.of(make_models.ensure(args.model), args.dtype, limits)
    print(f"read {limits.read_bandwidth / 1e9:.1f} GB/s ({limits.read_bandwidth_1_thread / 1e9:.1f} with one thread)")
    print(f"products {limits.peak_rate / 1e12:.3f} T/s ({limits.peak_type}, {limits.peak_rows} rows)")
    print(f"{'':6}{'total s':>9}{'TTFT ms':>10}{'TPOT ms':>9}{'steps':>7}{'step size':>11}")
    for name in workloads.NAMES:
        run = floor_of(workloads.build(name, rate=args.rate), cost)
        size_name = "any" if run.step_size == STEP_SIZES[-1] else str(run.step_size)
        row = f"{run.total:9.2f}{1e3 * run.ttft:10.1f}{1e3 * run.tpot:9.2f}{run.num_steps:7}{size_name:>11}"
        print(f"{name:6}{row}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
