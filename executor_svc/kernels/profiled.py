"""A kernel set whose ops are timed, for `--profile-ops`. Without that flag nothing of this is made.

Calls are timed on the host: right on a CPU, where an op has ended when it returns. A read of the clock at either end
costs a tenth of a microsecond.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from time import perf_counter
from typing import Any

from torch import Tensor

from executor_svc.kernels import KernelSet
from executor_svc.kernels.linear import Linear, PackLinear
from executor_svc.kernels.linear_activation.reference import make_linear_activation
from executor_svc.kernels.paged_attention import PagedAttention, PlanAttention, RaggedBatch
from executor_svc.kernels.record.reference import record

OPS = ("linear", "attention", "norms", "rotary_kv", "activation", "embedding", "ranks", "checks", "sampling")
"""Classes of ops. Those up to `ranks`, what ranks compute together, are the model's; checks look at what it gave."""
OP_OF_FIELD = {
    "pack_linear": "linear",
    "rms_norm": "norms",
    "add_rms_norm": "norms",
    "norm_query_key": "norms",
    "layer_norm": "norms",
    "add_layer_norm": "norms",
    "silu_and_mul": "activation",
    "gelu_and_mul": "activation",
    "gelu": "activation",
    "relu": "activation",
    "linear_activation": "activation",
    "norm_gelu": "norms",
    "add": "norms",
    "multiply": "activation",
    "silu": "activation",
    "rotary": "rotary_kv",
    "write_kv": "rotary_kv",
    "add_to": "norms",
    "scale": "norms",
    "rotary_write_kv": "rotary_kv",
    "plan_attention": "attention",
    "route_experts": "activation",
    "join_experts": "activation",
    "on_host": "ranks",
    "finite_rows": "checks",
    "uniform": "sampling",
    "forbid_tokens": "sampling",
    "add_logit_bias": "sampling",
    "apply_penalties": "sampling",
    "sample_tokens": "sampling",
    "gather_logprobs": "sampling",
}
"""The class of each op of a kernel set. Rows of a packed weight are the embedding."""


class OpTimes:
    """Seconds by class of op, added up on the device thread. Others may read them at any time."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(OPS, 0.0)

    def clear(self) -> None:
        """Begin again: the warm-up is nobody's work."""
        self.seconds.update(dict.fromkeys(OPS, 0.0))

    def timed(self, op: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` with its time counted."""
        seconds = self.seconds

        def timed_call(*arguments: Any, **named: Any) -> Any:
            started = perf_counter()
            result = call(*arguments, **named)
            seconds[op] += perf_counter() - started
            return result

        return timed_call


def profiled(kernels: KernelSet, times: OpTimes) -> KernelSet:
    """Return a set that computes what `kernels` does, and counts the time of each op in `times`.

    Raises KeyError where an op of the set has no class. Packing is not timed: it is done once, at the load.
    """
    ops = [
        field.name
        for field in dataclasses.fields(kernels)
        if callable(getattr(kernels, field.name)) and field.name != "record"
    ]
    timed: dict[str, Any] = {name: times.timed(OP_OF_FIELD[name], getattr(kernels, name)) for name in ops}
    made: dict[str, Any] = {
        # Recorded, the ops would not pass by here.
        "record": record,
        "pack_linear": _pack_timed(kernels.pack_linear, times),
        "plan_attention": _plan_timed(kernels, times),
        "on_host": lambda function: times.timed("ranks", kernels.on_host(function)),
        # The layer and its activation each under its own class.
        "linear_activation": make_linear_activation(
            **{name: timed[name] for name in ("gelu", "relu", "silu_and_mul", "gelu_and_mul")}
        ),
    }
    return dataclasses.replace(kernels, **(timed | made))


class _TimedLinear:
    def __init__(self, linear: Linear, times: OpTimes) -> None:
        self._call = times.timed("linear", linear)
        self._logits = times.timed("linear", linear.logits)
        self._likeliest = times.timed("linear", linear.likeliest)
        self._rows = times.timed("embedding", linear.weight_rows)

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        result: Tensor = self._call(x)
        return result

    def logits(self, x: Tensor) -> Tensor:
        """See Linear."""
        result: Tensor = self._logits(x)
        return result

    def likeliest(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """See Linear."""
        result: tuple[Tensor, Tensor] | None = self._likeliest(x)
        return result

    def weight_rows(self, indices: Tensor) -> Tensor:
        """See Linear."""
        result: Tensor = self._rows(indices)
        return result


def _pack_timed(pack: PackLinear, times: OpTimes) -> PackLinear:
    def pack_linear(weight: Tensor, bias: Tensor | None) -> Linear:
        return _TimedLinear(pack(weight, bias), times)

    return pack_linear


def _plan_timed(kernels: KernelSet, times: OpTimes) -> PlanAttention:
    def plan_attention(batch: RaggedBatch, block_size: int) -> PagedAttention:
        # The plan itself is not timed: mostly it is made ahead, on another thread and beside another step.
        return times.timed("attention", kernels.plan_attention(batch, block_size))

    return plan_attention
