"""From a loaded model to a runner on a device: memory is measured, KV blocks are taken, graphs captured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from executor_svc.batch import Limits
from executor_svc.device import Device, is_out_of_memory
from executor_svc.kernels import KernelSet
from executor_svc.kv_cache import KVCache, block_bytes
from executor_svc.models import CausalLM, LoadedModel
from executor_svc.parallel.lead import LeadingModel
from executor_svc.pipeline.graphs import graph_sizes
from executor_svc.pipeline.leading import Leading
from executor_svc.pipeline.profile import Profile, measure, size
from executor_svc.pipeline.runner import PipelinedRunner
from octavo.rpc.settings import SettingsError

logger = logging.getLogger(__name__)

UNLIMITED = 1 << 60
"""Bytes that no KV memory has."""


@dataclass(frozen=True)
class DevicePlan:
    """What the settings say of a device."""

    memory_share: float
    """--gpu-memory-utilization."""
    kv_memory: int | None
    """--kv-memory, bytes."""
    is_eager: bool
    """--enforce-eager."""


def load_runner(
    model: LoadedModel,
    kernels: KernelSet,
    dtype: torch.dtype,
    block_size: int,
    plan: DevicePlan,
    limits_of: Callable[[int], Limits],
    device: Device,
    leading: Leading | None = None,
) -> PipelinedRunner:
    """Return the runner. limits_of: what can be held with so many bytes for KV, where the settings name none.
    `leading`: where this is rank 0 of several; what the others do meanwhile is load_follower.

    Raises SettingsError, with the numbers, where something does not fit.
    """
    # Weights came on streams of the threads that loaded them.
    device.synchronize()
    captures = not plan.is_eager and can_be_captured(model, kernels)
    runs: LoadedModel | LeadingModel = model if leading is None else leading.model
    most = limits_of(UNLIMITED)
    profile = measure(runs, model.config, kernels, most, dtype, device, has_graphs=captures)
    left = profile.kv_memory(plan.memory_share)
    if leading is not None:
        left = leading.least(left)
    limits, kv_cache = take_kv_memory(model, dtype, block_size, plan, limits_of, device, profile, left)
    capture_model = None if leading is None else leading.graphs.capture
    runner = PipelinedRunner(runs, kv_cache, kernels, limits, device, capture_model)
    if captures:
        with out_of_memory(device, "the graphs of decode steps", "--gpu-memory-utilization, or set --enforce-eager"):
            runner.capture_graphs(graph_sizes(min(limits.max_num_seqs, limits.max_num_batched_tokens)))
    runner.warm_up()
    return runner


def take_kv_memory(
    model: LoadedModel,
    dtype: torch.dtype,
    block_size: int,
    plan: DevicePlan,
    limits_of: Callable[[int], Limits],
    device: Device,
    profile: Profile,
    left: int,
) -> tuple[Limits, KVCache]:
    """Take what `left` bytes hold, and return what that allows. Raises SettingsError, with the numbers."""
    account = profile.account(plan.memory_share)
    try:
        limits = limits_of(left)
    except SettingsError as error:
        raise SettingsError(f"--gpu-memory-utilization {plan.memory_share}: {account}; {error}") from None
    kv_bytes = limits.num_blocks * block_bytes(model.config, block_size, dtype)
    fields = {"kv_bytes": kv_bytes, "left_bytes": left, "total_bytes": profile.total, "others_bytes": profile.others}
    fields |= {"held_bytes": profile.held, "step_bytes": profile.step, "graph_bytes": profile.graphs}
    logger.info("device memory measured", extra={"fields": fields})
    if kv_bytes > left:
        raise SettingsError(
            f"--kv-memory {plan.kv_memory}: with --gpu-memory-utilization {plan.memory_share}, {account}, which leaves "
            f"{size(left)} for KV; lower it, or raise --gpu-memory-utilization"
        )
    with device.on(device.compute), out_of_memory(device, f"{size(kv_bytes)} of KV blocks", "--gpu-memory-utilization"):
        return limits, KVCache.allocate(model.config, limits.num_blocks, block_size, dtype, device.torch_device)


def can_be_captured(model: LoadedModel, kernels: KernelSet) -> bool:
    """Whether decode steps can be graphs; where not, say why."""
    reason = None
    if kernels.name != "triton":
        reason = f"kernels of the set {kernels.name} read numbers on the host"
    elif not isinstance(model, CausalLM):
        reason = f"{model.config.architecture} is run by {model.code}, whose code may read numbers on the host"
    elif model.config.experts is not None:
        reason = "which experts a step needs is read on the host"
    if reason is not None:
        logger.info("decode steps are launched op by op", extra={"fields": {"reason": reason}})
    return reason is None


@contextmanager
def out_of_memory(device: Device, what: str, lower: str) -> Iterator[None]:
    """Turn a lack of the device's memory into a SettingsError with the numbers. `lower`: what to lower."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        memory = device.memory()
        raise SettingsError(
            f"{what} do not fit into the memory of {device.name}: of {size(memory.total)}, {size(memory.in_use)} hold "
            f"tensors of this executor, {size(memory.others)} others, and {size(memory.free)} are free; lower {lower} "
            f"({str(error).splitlines()[0]})"
        ) from None
