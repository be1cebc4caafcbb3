"""What this machine can do at most: read bandwidth of memory and rate of matrix products: python bench/limits.py.

Bandwidth is that of stream_read.c, and of a sum in torch, whichever is higher: one thread and all. The rate is the best
that matrix products, torch's and Octavo's own, reach on all threads, over types and numbers of rows. Floors divide by
both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

if TYPE_CHECKING:
    from executor_svc.kernels.linear import PackLinear

_SOURCE = Path(__file__).with_name("stream_read.c")
_ROWS = (64, 128, 256, 512, 1024)
_INNER, _OUTER = 2048, 8192


@dataclass(frozen=True)
class Limits:
    """Bytes and operations a second. A product and its sum are two operations."""

    read_bandwidth: float
    read_bandwidth_1_thread: float
    peak_rate: float
    peak_type: str
    peak_rows: int
    num_threads: int


def known_or_measured(file: Path | None, num_threads: int | None = None) -> Limits:
    """Return the limits that a file holds, as this program prints them, or measure them. Raises OSError, ValueError."""
    return measure_apart(num_threads) if file is None else Limits(**json.loads(file.read_text(encoding="utf-8")))


def measure_apart(num_threads: int | None = None, *, seconds: float = 2.0, mebibytes: int = 1024) -> Limits:
    """Measure in a process of its own, whose threads and memory are gone afterwards. Raises SystemExit.

    `seconds` for each bandwidth; `mebibytes` read in each pass: more than any cache holds.
    """
    command = [sys.executable, __file__, "--seconds", str(seconds), "--mebibytes", str(mebibytes)]
    command += [] if num_threads is None else ["--threads", str(num_threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit("bench/limits.py failed")
    return Limits(**json.loads(done.stdout))


def measure(num_threads: int, seconds: float, mebibytes: int) -> Limits:
    """Measure in this process."""
    peak_rate, peak_type, peak_rows = _peak_rate(num_threads, seconds / 4)
    return Limits(
        read_bandwidth=_read_bandwidth(num_threads, seconds, mebibytes),
        read_bandwidth_1_thread=_read_bandwidth(1, seconds, mebibytes),
        peak_rate=peak_rate,
        peak_type=peak_type,
        peak_rows=peak_rows,
        num_threads=num_threads,
    )


def _read_bandwidth(num_threads: int, seconds: float, mebibytes: int) -> float:
    return max(_bandwidth_in_c(num_threads, seconds, mebibytes), _bandwidth_in_torch(num_threads, seconds, mebibytes))


def _bandwidth_in_c(num_threads: int, seconds: float, mebibytes: int) -> float:
    """Return what stream_read.c prints, or 0 where no C compiler makes it."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "stream_read"
        compiler = os.environ.get("CC", "cc")
        command = [compiler, "-O3", "-march=native", "-fopenmp", str(_SOURCE), "-o", str(program)]
        try:
            subprocess.run(command, check=True, stdout=sys.stderr)
            environ = os.environ | {"OMP_NUM_THREADS": str(num_threads)}
            arguments = [str(program), str(mebibytes), str(seconds)]
            done = subprocess.run(arguments, env=environ, check=True, stdout=subprocess.PIPE)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"stream_read.c was not run ({error}): the bandwidth is torch's", file=sys.stderr)
            return 0.0
    return float(done.stdout)


def _bandwidth_in_torch(num_threads: int, seconds: float, mebibytes: int) -> float:
    import torch

    torch.set_num_threads(num_threads)
    values = torch.ones(mebibytes << 18)
    return values.numel() * values.element_size() / _best_time(values.sum, seconds)


def _peak_rate(num_threads: int, seconds: float) -> tuple[float, str, int]:
    import torch
    from torch.nn.functional import linear

    torch.set_num_threads(num_threads)
    pack_linear = _own_products(num_threads)
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.randn(_OUTER, _INNER).to(dtype)
        products = [partial(linear, weight=weight)]
        if pack_linear is not None:
            products.append(pack_linear(weight, None))
        for rows in _ROWS:
            inputs = torch.randn(rows, _INNER).to(dtype)
            with torch.inference_mode():
                best = min(_best_time(partial(product, inputs), seconds / len(products)) for product in products)
            found.append((2.0 * rows * _INNER * _OUTER / best, str(dtype).removeprefix("torch."), rows))
    return max(found)


def _own_products(num_threads: int) -> PackLinear | None:
    """Return what packs a weight for Octavo's kernels; None where they cannot be compiled."""
    from executor_svc.kernels import build_kernels
    from executor_svc.kernels.native.build import KernelBuildError

    try:
        return build_kernels("cpu", num_threads).pack_linear
    except KernelBuildError as error:
        print(f"Octavo's kernels were not run ({error}): the rate is torch's", file=sys.stderr)
        return None


def _best_time(work: Callable[[], object], seconds: float) -> float:
    """Return the shortest time of several runs: what the machine can do when nothing disturbs it."""
    work()
    end, best = time.perf_counter() + seconds, float("inf")
    while time.perf_counter() < end:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def main() -> int:
    """Measure and print as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="[default: all cores]")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each bandwidth [default: 2]")
    parser.add_argument("--mebibytes", type=int, default=1024, help="read in each pass [default: 1024]")
    args = parser.parse_args()
    print(json.dumps(asdict(measure(args.threads, args.seconds, args.mebibytes)), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
