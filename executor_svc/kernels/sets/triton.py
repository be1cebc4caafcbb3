"""The GPU's set: Triton kernels, and torch's own where that is what a GPU does best."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os

import torch

from executor_svc.kernels import KernelSet
from executor_svc.kernels.elementwise.reference import add_to, scale
from executor_svc.kernels.gpu import Gpu
from executor_svc.kernels.linear.reference import pack_linear
from executor_svc.kernels.linear_activation.reference import make_linear_activation
from executor_svc.kernels.norm.reference import make_norm_query_key
from executor_svc.kernels.routed_experts.reference import join_experts, route_experts
from executor_svc.kernels.unfused.reference import add, multiply, rotary, silu, write_kv

OLDEST_TRITON = (3, 6)
OLDEST_CAPABILITY = (8, 0)
"""Of NVIDIA's cards: the first that multiply bfloat16, and copy to shared memory beside the arithmetic."""
LEAST_SHARED_BYTES = 65_536
"""Shared memory that a program has on every card."""


class GpuUnusableError(ValueError):
    """The set cannot run here; the message says what to change."""


def build(device: torch.device) -> KernelSet:
    """Give the set for a device, its matrix products summed in float32. Raises GpuUnusableError."""
    gpu = find_gpu(device)
    check_triton()
    # The contract of linear; torch would add the parts of a product in 16 bits.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    return assemble(gpu)


def assemble(gpu: Gpu) -> KernelSet:
    """Give the set as it is launched on such a GPU, whether or not there is one."""
    # Triton 3.10 turns it round. The one kernel whose rounding it would change says so itself.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    from executor_svc.kernels.activation.triton_impl import gelu, gelu_and_mul, relu, silu_and_mul
    from executor_svc.kernels.finite.triton_impl import finite_rows
    from executor_svc.kernels.forbidden.triton_impl import forbid_tokens
    from executor_svc.kernels.logit_bias.triton_impl import add_logit_bias
    from executor_svc.kernels.logprobs.triton_impl import gather_logprobs
    from executor_svc.kernels.noise.triton_impl import uniform
    from executor_svc.kernels.norm.triton_impl import add_layer_norm, add_rms_norm, layer_norm, rms_norm
    from executor_svc.kernels.norm_gelu.triton_impl import norm_gelu
    from executor_svc.kernels.on_host.reference import on_host
    from executor_svc.kernels.paged_attention.triton_impl import make_plan_attention
    from executor_svc.kernels.penalties.triton_impl import apply_penalties
    from executor_svc.kernels.record.reference import record
    from executor_svc.kernels.rotary_write_kv.triton_impl import rotary_write_kv
    from executor_svc.kernels.sampling.triton_impl import sample_tokens

    return KernelSet(
        name="triton",
        build=f"triton {triton_version()} {gpu.name} {gpu.processors}",
        # Which of its kernels cuBLAS takes for a product depends on the number of rows, and so does attention's cut.
        batch_invariant=False,
        # torch hands products to cuBLAS, which is what they would be compared with.
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
        plan_attention=make_plan_attention(gpu),
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


def find_gpu(device: torch.device) -> Gpu:
    """Give the figures of a device. Raises GpuUnusableError: no GPU, no driver, or one that is too old."""
    if device.type != "cuda":
        raise GpuUnusableError(
            f"these kernels run on GPUs, not on {device.type}; take --kernels cpu or reference there"
        )
    if torch.version.cuda is None and torch.version.hip is None:
        raise GpuUnusableError(
            f"torch {torch.__version__} is built for CPUs alone; install one with CUDA, as constraints-gpu.txt has it"
        )
    if not torch.cuda.is_available():
        raise GpuUnusableError(
            f"torch {torch.__version__} finds no GPU; see that nvidia-smi lists one, that its driver knows CUDA "
            f"{torch.version.cuda}, and that this process may see it (CUDA_VISIBLE_DEVICES, the container's devices)"
        )
    if (index := device.index or 0) >= torch.cuda.device_count():
        raise GpuUnusableError(f"there is no GPU {index}; {torch.cuda.device_count()} can be seen, counted from 0")
    try:
        properties = torch.cuda.get_device_properties(device)
    except RuntimeError as error:
        raise GpuUnusableError(
            f"GPU {index} does not start: {str(error).splitlines()[0]}; see that nvidia-smi lists it without a fault"
        ) from None
    capability = properties.major, properties.minor
    if torch.version.hip is None and capability < OLDEST_CAPABILITY:
        raise GpuUnusableError(
            f"{properties.name} has compute capability {capability[0]}.{capability[1]}; these kernels need "
            f"{OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]} (Ampere) or later"
        )
    # torch tells it of NVIDIA's cards.
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", 0) or LEAST_SHARED_BYTES
    return Gpu(properties.name, properties.multi_processor_count, shared_bytes)


def check_triton() -> None:
    """Raise GpuUnusableError where Triton is missing or older than the kernels are written for."""
    wanted = ".".join(map(str, OLDEST_TRITON))
    if importlib.util.find_spec("triton") is None:
        raise GpuUnusableError(f"Triton is not installed; install triton>={wanted} (the extra octavo[gpu])")
    version = triton_version()
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TRITON:
        raise GpuUnusableError(f"Triton {version} is too old; install triton>={wanted} (the extra octavo[gpu])")


def triton_version() -> str:
    """Return the version of the Triton that is installed, under whatever name its build is distributed."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return str(importlib.import_module("triton").__version__)
