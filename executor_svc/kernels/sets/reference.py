"""The reference set: plain torch, any device, as clear as can be. What every other set is checked against."""

from __future__ import annotations

import torch

from executor_svc.kernels import KernelSet
from executor_svc.kernels.activation.reference import gelu, gelu_and_mul, relu, silu_and_mul
from executor_svc.kernels.elementwise.reference import add_to, scale
from executor_svc.kernels.finite.reference import finite_rows
from executor_svc.kernels.forbidden.reference import forbid_tokens
from executor_svc.kernels.linear.reference import pack_linear
from executor_svc.kernels.linear_activation.reference import make_linear_activation
from executor_svc.kernels.logit_bias.reference import add_logit_bias
from executor_svc.kernels.logprobs.reference import gather_logprobs
from executor_svc.kernels.noise.reference import uniform
from executor_svc.kernels.norm.reference import add_layer_norm, add_rms_norm, layer_norm, make_norm_query_key, rms_norm
from executor_svc.kernels.norm_gelu.reference import norm_gelu
from executor_svc.kernels.on_host.reference import on_host
from executor_svc.kernels.paged_attention.reference import plan_attention
from executor_svc.kernels.penalties.reference import apply_penalties
from executor_svc.kernels.record.reference import record
from executor_svc.kernels.rotary_write_kv.reference import rotary_write_kv
from executor_svc.kernels.routed_experts.reference import join_experts, route_experts
from executor_svc.kernels.sampling.reference import sample_tokens
from executor_svc.kernels.unfused.reference import add, multiply, rotary, silu, write_kv


def build() -> KernelSet:
    """Give the set."""
    return KernelSet(
        name="reference",
        build=f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}",
        batch_invariant=False,
        pack_linear=pack_linear,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        norm_query_key=make_norm_query_key(rms_norm),
        layer_norm=layer_norm,
        add_layer_norm=add_layer_norm,
        silu_and_mul=silu_and_mul,
        gelu_and_mul=gelu_and_mul,
        gelu=gelu,
        relu=relu,
        linear_activation=make_linear_activation(
            gelu=gelu, relu=relu, silu_and_mul=silu_and_mul, gelu_and_mul=gelu_and_mul
        ),
        norm_gelu=norm_gelu,
        add=add,
        multiply=multiply,
        silu=silu,
        rotary=rotary,
        write_kv=write_kv,
        add_to=add_to,
        scale=scale,
        rotary_write_kv=rotary_write_kv,
        plan_attention=plan_attention,
        route_experts=route_experts,
        join_experts=join_experts,
        record=record,
        on_host=on_host,
        finite_rows=finite_rows,
        add_logit_bias=add_logit_bias,
        apply_penalties=apply_penalties,
        forbid_tokens=forbid_tokens,
        uniform=uniform,
        sample_tokens=sample_tokens,
        gather_logprobs=gather_logprobs,
    )
