"""The CPU set: compiled kernels."""

from __future__ import annotations

from executor_svc.kernels import KernelSet
from executor_svc.kernels.activation.cpu import silu_and_mul
from executor_svc.kernels.linear.cpu import make_pack_linear
from executor_svc.kernels.logit_bias.cpu import add_logit_bias
from executor_svc.kernels.logprobs.cpu import gather_logprobs
from executor_svc.kernels.native.library import load_library
from executor_svc.kernels.norm.cpu import add_rms_norm, rms_norm
from executor_svc.kernels.paged_attention.cpu import make_plan_attention
from executor_svc.kernels.penalties.cpu import apply_penalties
from executor_svc.kernels.rotary_write_kv.cpu import make_rotary_write_kv
from executor_svc.kernels.sampling.cpu import sample_tokens


def build(num_threads: int | None) -> KernelSet:
    """Give the set, its compute threads at hand. Raises KernelBuildError and InstructionSetError."""
    library = load_library(num_threads)
    return KernelSet(
        name="cpu",
        build=library.name,
        batch_invariant=True,
        pack_linear=make_pack_linear(library),
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        silu_and_mul=silu_and_mul,
        rotary_write_kv=make_rotary_write_kv(library),
        plan_attention=make_plan_attention(library),
        add_logit_bias=add_logit_bias,
        apply_penalties=apply_penalties,
        sample_tokens=sample_tokens,
        gather_logprobs=gather_logprobs,
    )
