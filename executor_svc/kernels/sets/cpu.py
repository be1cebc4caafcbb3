"""The CPU set: compiled kernels."""

from __future__ import annotations

from executor_svc.kernels import KernelSet
from executor_svc.kernels.activation.cpu import make_gelu, make_gelu_and_mul, make_relu, make_silu_and_mul
from executor_svc.kernels.elementwise.cpu import make_add_to, make_scale
from executor_svc.kernels.finite.cpu import make_finite_rows
from executor_svc.kernels.forbidden.cpu import make_forbid_tokens
from executor_svc.kernels.linear.cpu import make_pack_linear
from executor_svc.kernels.linear_activation.cpu import make_linear_activation
from executor_svc.kernels.logit_bias.cpu import make_add_logit_bias
from executor_svc.kernels.logprobs.cpu import make_gather_logprobs
from executor_svc.kernels.native.library import load_library
from executor_svc.kernels.noise.cpu import make_uniform
from executor_svc.kernels.norm.cpu import make_layer_norms, make_norm_query_key, make_rms_norms
from executor_svc.kernels.norm_gelu.cpu import make_norm_gelu
from executor_svc.kernels.on_host.cpu import make_on_host
from executor_svc.kernels.paged_attention.cpu import make_plan_attention
from executor_svc.kernels.penalties.cpu import make_apply_penalties
from executor_svc.kernels.record.cpu import make_record
from executor_svc.kernels.rotary_write_kv.cpu import make_rotary_write_kv
from executor_svc.kernels.routed_experts.reference import join_experts, route_experts
from executor_svc.kernels.sampling.cpu import make_sample_tokens
from executor_svc.kernels.unfused.cpu import make_add, make_multiply, make_rotary, make_silu, make_write_kv


def build(num_threads: int | None) -> KernelSet:
    """Give the set, its compute threads at hand. Raises KernelBuildError and InstructionSetError."""
    library = load_library(num_threads)
    rms_norm, add_rms_norm = make_rms_norms(library)
    layer_norm, add_layer_norm = make_layer_norms(library)
    return KernelSet(
        name="cpu",
        build=library.name,
        batch_invariant=True,
        pack_linear=make_pack_linear(library),
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        norm_query_key=make_norm_query_key(library),
        layer_norm=layer_norm,
        add_layer_norm=add_layer_norm,
        silu_and_mul=make_silu_and_mul(library),
        gelu_and_mul=make_gelu_and_mul(library),
        gelu=make_gelu(library),
        relu=make_relu(library),
        linear_activation=make_linear_activation(library),
        norm_gelu=make_norm_gelu(library),
        add=make_add(library),
        multiply=make_multiply(library),
        silu=make_silu(library),
        rotary=make_rotary(library),
        write_kv=make_write_kv(library),
        add_to=make_add_to(library),
        scale=make_scale(library),
        rotary_write_kv=make_rotary_write_kv(library),
        plan_attention=make_plan_attention(library),
        route_experts=route_experts,
        join_experts=join_experts,
        record=make_record(library),
        on_host=make_on_host(library),
        finite_rows=make_finite_rows(library),
        add_logit_bias=make_add_logit_bias(library),
        apply_penalties=make_apply_penalties(library),
        forbid_tokens=make_forbid_tokens(library),
        uniform=make_uniform(library),
        sample_tokens=make_sample_tokens(library),
        gather_logprobs=make_gather_logprobs(library),
    )
