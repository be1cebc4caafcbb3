"""torch.compile in the place of the passes: the unfused graph; products, attention and KV write stay as they are."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from fusion_models import make_model
from torch import Tensor

from executor_svc.graph.optimize import choose_passes
from executor_svc.kernels import KernelSet, build_kernels
from executor_svc.kernels.paged_attention import PagedAttention, RaggedBatch
from executor_svc.kernels.record.reference import record
from executor_svc.models import CausalLM

_LINEARS: list[Any] = []
"""By number: what a node of the compiled graph can name."""
_KERNELS: list[KernelSet] = []
_ATTENTION: list[PagedAttention] = []
"""That of the step that runs."""
_NEAR = ("rms_norm", "layer_norm", "add", "multiply", "silu", "gelu", "relu", "rotary")
"""What Inductor gets to see."""


@torch.library.custom_op("octavo_fusion::linear", mutates_args=())
def _linear(x: Tensor, number: int) -> Tensor:
    result: Tensor = _LINEARS[number](x)
    return result


@_linear.register_fake
def _(x: Tensor, number: int) -> Tensor:
    return x.new_empty((x.shape[0], _LINEARS[number].out_features))


@torch.library.custom_op("octavo_fusion::write_kv", mutates_args=("key_cache", "value_cache"))
def _write_kv(key: Tensor, value: Tensor, slots: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    _KERNELS[0].write_kv(key, value, slots, key_cache, value_cache)


@torch.library.custom_op("octavo_fusion::attention", mutates_args=())
def _attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float, window: int, soft_cap: float
) -> Tensor:
    return _ATTENTION[0](query, key_cache, value_cache, scale, window=window, soft_cap=soft_cap)


@_attention.register_fake
def _(query: Tensor, *_: object) -> Tensor:
    return query.new_empty(query.shape)


class _Linear:
    """A packed layer that a compiled graph calls by its number."""

    def __init__(self, linear: Any, out_features: int) -> None:
        self._linear = linear
        self.out_features = out_features
        self._number = len(_LINEARS)
        _LINEARS.append(self)

    def __call__(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            result: Tensor = self._linear(x)
            return result
        return torch.ops.octavo_fusion.linear(x, self._number)  # type: ignore[no-any-return]

    def logits(self, x: Tensor) -> Tensor:
        result: Tensor = self._linear.logits(x)
        return result

    def likeliest(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        result: tuple[Tensor, Tensor] | None = self._linear.likeliest(x)
        return result

    def weight_rows(self, indices: Tensor) -> Tensor:
        result: Tensor = self._linear.weight_rows(indices)
        return result


class _Plan:
    """Attention that a compiled graph calls without holding the step's rows."""

    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        *,
        window: int = 0,
        soft_cap: float = 0.0,
    ) -> Tensor:
        return torch.ops.octavo_fusion.attention(query, key_cache, value_cache, scale, window, soft_cap)  # type: ignore[no-any-return]


def compiled_by_torch(shape: str, kernels: KernelSet, **others: Any) -> CausalLM:
    """Return a model whose unfused layers Inductor compiles at their first step."""
    torch._dynamo.config.cache_size_limit = 64
    reference = build_kernels("reference")
    _KERNELS[:] = [kernels]
    plan = _Plan()

    def pack_linear(weight: Tensor, bias: Tensor | None) -> Any:
        return _Linear(kernels.pack_linear(weight, bias), len(weight))

    def plan_attention(batch: RaggedBatch, block_size: int) -> PagedAttention:
        _ATTENTION[:] = [kernels.plan_attention(batch, block_size)]
        return plan

    near = dataclasses.replace(
        kernels,
        **{name: getattr(reference, name) for name in _NEAR},
        pack_linear=pack_linear,
        plan_attention=plan_attention,
        write_kv=torch.ops.octavo_fusion.write_kv,
        record=record,
    )
    # Buffers are Inductor's to plan.
    model = make_model(shape, near, choose_passes("none,liveness"), **others)
    model.layers._run = torch.compile(model.layers._run, dynamic=False)
    return model
