"""A custom operator from start to speed-up: python examples/own_op.py [--json OUT]

In Gemma 2, Gemma 3 and other models each sublayer's output is normed before it is added, and the sum is normed again:

    h = rms_norm(x, inner) + residual;  y = rms_norm(h, outer)

Octavo fuses the sum with the second norm. This op does all three in one pass over a row. Serve with it by
`octavo up MODEL --ops examples.own_op`; what it matches is shown by `octavo graph MODEL --ops examples.own_op`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from executor_svc.graph import ops
from executor_svc.graph.custom import CustomOp
from executor_svc.graph.native_op import Cpp
from executor_svc.kernels import build_kernels
from executor_svc.kernels.native.library import ADDRESS, FLOAT, INT32, INT64, NativeLibrary


def pattern(x, inner, residual, outer, inner_eps, outer_eps):  # type: ignore[no-untyped-def]
    """What the op stands for, in plain ops; its results are the sum and the norm of it."""
    h = ops.add(ops.rms_norm(x, inner, inner_eps), residual)
    return h, ops.rms_norm(h, outer, outer_eps)


def reference(
    x: Tensor, inner: Tensor, residual: Tensor, outer: Tensor, inner_eps: float, outer_eps: float
) -> tuple[Tensor, Tensor]:
    """The same in plain torch: what every version is checked against when it is loaded."""

    def norm(value: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = value.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(value.dtype)

    h = norm(x, inner, inner_eps) + residual
    return h, norm(h, outer, outer_eps)


def make(library: NativeLibrary) -> Callable[..., tuple[Tensor, Tensor]]:
    """Make the op of the compiled source beside this file."""
    run = library.function("norm_add_norm", *[ADDRESS] * 6, INT64, INT64, FLOAT, FLOAT, INT32)

    def norm_add_norm(
        x: Tensor, inner: Tensor, residual: Tensor, outer: Tensor, inner_eps: float, outer_eps: float
    ) -> tuple[Tensor, Tensor]:
        h, y = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
        addresses = [each.data_ptr() for each in (x, inner, residual, outer, h, y)]
        run(*addresses, *x.shape, inner_eps, outer_eps, x.dtype == torch.bfloat16)
        return h, y

    return norm_add_norm


def examples(dtype: torch.dtype) -> list[tuple[object, ...]]:
    """Arguments that the versions are checked on."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return [
        (random(rows, width), random(width), random(rows, width), random(width), 1e-6, 1e-5)
        for rows, width in ((1, 8), (3, 33), (40, 640))
    ]


OPS = [
    CustomOp(
        name="norm_add_norm",
        description="the norm of a sublayer's output, the residual sum and the next norm in one pass",
        pattern=pattern,
        reference=reference,
        examples=examples,
        cpu=Cpp(Path(__file__).with_name("own_op.cpp"), make),
    )
]


def main() -> int:
    """Measure the op against the ops that it replaces, in turns."""
    parser = argparse.ArgumentParser(description="Measure the op of this example.")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--width", type=int, default=640, help="640 is Gemma 3 270M's")
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    kernels, own = build_kernels("cpu"), OPS[0].cpu.load()  # type: ignore[union-attr]
    x, residual = (torch.randn(args.rows, args.width).bfloat16() for _ in range(2))
    inner, outer = (torch.randn(args.width).bfloat16() for _ in range(2))

    def fused_by_octavo() -> None:
        kernels.add_rms_norm(kernels.rms_norm(x, inner, 1e-6), residual, outer, 1e-6)

    def fused_by_the_op() -> None:
        own(x, inner, residual, outer, 1e-6, 1e-6)

    seconds: dict[str, list[float]] = {"octavo's ops": [], "the op": []}
    for pair in range(args.pairs):
        sides = [("octavo's ops", fused_by_octavo), ("the op", fused_by_the_op)]
        for name, call in sides if pair % 2 else sides[::-1]:
            started = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(each) * 1e6 for name, each in seconds.items()}
    ratio = statistics.median(a / b for a, b in zip(*seconds.values(), strict=True))
    for name, each in medians.items():
        print(f"{name:14}{each:10.1f} microseconds")
    print(f"{ratio:.2f} times as fast on {args.rows} rows of {args.width}")
    if args.json is not None:
        args.json.write_text(json.dumps({"microseconds": medians, "speed_up": ratio}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
