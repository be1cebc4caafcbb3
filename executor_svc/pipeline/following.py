"""How a rank that is not the first begins on a device: its part of the largest step, and its KV memory.

Rank 0 launches and waits; this one launches what it is told and waits for nothing. Its host runs no further ahead of
its device than rank 0's does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from executor_svc.batch import Limits
from executor_svc.device import Device
from executor_svc.kernels import KernelSet
from executor_svc.models import CausalLM
from executor_svc.parallel.lead import ConnectedRanks, Follower
from executor_svc.parallel.messages import Kind
from executor_svc.pipeline.load import UNLIMITED, DevicePlan, can_be_captured, take_kv_memory
from executor_svc.pipeline.profile import Profile, graph_memory, kv_of_measuring


def load_follower(
    model: CausalLM,
    kernels: KernelSet,
    dtype: torch.dtype,
    block_size: int,
    plan: DevicePlan,
    limits_of: Callable[[int], Limits],
    device: Device,
    ranks: ConnectedRanks,
) -> Follower:
    """Return what follows rank 0, once KV memory has been taken, while rank 0 is in load_runner. See there."""
    device.synchronize()
    most = limits_of(UNLIMITED)
    device.give_back()
    device.reset_peak()
    before = device.memory().in_use
    kv_cache = kv_of_measuring(model.config, block_size, dtype, device)
    with device.on(device.compute):
        Follower(model, kv_cache, ranks).follow(until=Kind.PAUSE)
    # Of what rank 0 runs on all ranks, one rank needs no more than rank 0, which samples too.
    device.synchronize()
    step = device.memory().peak - before
    captures = not plan.is_eager and can_be_captured(model, kernels)
    graphs = graph_memory(most, step) if captures else 0
    del kv_cache
    device.give_back()
    memory = device.memory()
    profile = Profile(device.name, memory.total, memory.others, memory.in_use, step, graphs)
    left = ranks.group.least(profile.kv_memory(plan.memory_share))
    _, kv_cache = take_kv_memory(model, dtype, block_size, plan, limits_of, device, profile, left)
    return Follower(model, kv_cache, ranks, device=device)
