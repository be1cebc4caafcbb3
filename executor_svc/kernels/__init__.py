"""Kernel sets: every op that has a fast version, chosen once at start and handed down by constructor.

Each op has a folder: its contract in `__init__.py` (a Protocol), the plain-torch reference in `reference.py`, faster
versions beside it (`cpu.py`, ...). A set is one file in `sets/` that names an implementation for every field: a field
that a set lacks is an error when the set is built, never a silent fallback.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from executor_svc.kernels.activation import Gelu, GeluAndMul, Relu, SiluAndMul
from executor_svc.kernels.elementwise import AddTo, Scale
from executor_svc.kernels.finite import FiniteRows
from executor_svc.kernels.forbidden import ForbidTokens
from executor_svc.kernels.linear import PackLinear
from executor_svc.kernels.linear_activation import LinearActivation
from executor_svc.kernels.logit_bias import AddLogitBias
from executor_svc.kernels.logprobs import GatherLogprobs
from executor_svc.kernels.noise import Uniform
from executor_svc.kernels.norm import AddLayerNorm, AddRmsNorm, LayerNorm, NormQueryKey, RmsNorm
from executor_svc.kernels.norm_gelu import NormGelu
from executor_svc.kernels.on_host import OnHost
from executor_svc.kernels.paged_attention import PlanAttention
from executor_svc.kernels.penalties import ApplyPenalties
from executor_svc.kernels.record import Record
from executor_svc.kernels.rotary_write_kv import RotaryWriteKv
from executor_svc.kernels.routed_experts import JoinExperts, RouteExperts
from executor_svc.kernels.sampling import SampleTokens
from executor_svc.kernels.unfused import Add, Multiply, Rotary, Silu, WriteKv

KERNEL_SETS = ("reference", "cpu", "triton")
"""Names that build_kernels takes."""


@dataclass(frozen=True)
class KernelSet:
    """One implementation of every op. The contracts are the Protocols that the fields are typed with."""

    name: str
    build: str
    """What, beside the inputs, decides the bits that come out: the libraries and the instruction set."""
    batch_invariant: bool
    """Whether a row's result has the same bits whatever rows stand beside it and however its prompt is chunked."""
    pack_linear: PackLinear
    rms_norm: RmsNorm
    add_rms_norm: AddRmsNorm
    norm_query_key: NormQueryKey
    layer_norm: LayerNorm
    add_layer_norm: AddLayerNorm
    silu_and_mul: SiluAndMul
    gelu_and_mul: GeluAndMul
    gelu: Gelu
    relu: Relu
    linear_activation: LinearActivation
    norm_gelu: NormGelu
    add: Add
    multiply: Multiply
    silu: Silu
    rotary: Rotary
    write_kv: WriteKv
    add_to: AddTo
    scale: Scale
    rotary_write_kv: RotaryWriteKv
    plan_attention: PlanAttention
    route_experts: RouteExperts
    join_experts: JoinExperts
    record: Record
    on_host: OnHost
    finite_rows: FiniteRows
    add_logit_bias: AddLogitBias
    apply_penalties: ApplyPenalties
    forbid_tokens: ForbidTokens
    uniform: Uniform
    sample_tokens: SampleTokens
    gather_logprobs: GatherLogprobs

    @property
    def by_reference(self) -> tuple[str, ...]:
        """The ops for which the set names the reference's implementation, or one made of it. They run by torch."""
        ops = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return tuple(name for name, op in ops if getattr(op, "__module__", "").endswith(".reference"))


def build_kernels(name: str, num_threads: int | None = None, device: torch.device | None = None) -> KernelSet:
    """Build the named set for a device, the CPU by default, with this many compute threads of its own where it has any
    (by default one for each processor that the process may use).

    ValueError names the known sets where it is none of them, an instruction set that does not run here, and what is
    wrong with the device; KernelBuildError where a set must be compiled and cannot be.
    """
    if name == "reference":
        from executor_svc.kernels.sets.reference import build

        return build()
    if name == "cpu":
        from executor_svc.kernels.sets.cpu import build as build_cpu

        return build_cpu(num_threads)
    if name == "triton":
        from executor_svc.kernels.sets.triton import build as build_triton

        return build_triton(device or torch.device("cpu"))
    raise ValueError(f"unknown kernel set {name!r}; known: {', '.join(KERNEL_SETS)}")
