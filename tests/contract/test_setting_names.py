"""The names that settings take, and those that the services know, are the same."""

from __future__ import annotations

import torch

from executor_svc import kernels
from executor_svc.graph.optimize import PASS_NAMES
from executor_svc.load import KERNELS_OF_DEVICE
from octavo.settings import DEVICES, KERNEL_SETS, PASSES, PLACEMENTS, POLICIES
from scheduler_svc.placement_policies import POLICIES as PLACEMENT_POLICIES
from scheduler_svc.policies.registry import BUILT_IN


def test_policies() -> None:
    """Every policy that comes with the scheduler can be named, and no other by a short name."""
    assert sorted(POLICIES) == sorted(BUILT_IN)


def test_placements() -> None:
    """Every way to place a request can be named."""
    assert sorted(PLACEMENTS) == sorted(PLACEMENT_POLICIES)


def test_kernel_sets() -> None:
    """Likewise the executor's kernel sets."""
    assert sorted(KERNEL_SETS) == sorted(kernels.KERNEL_SETS)


def test_devices() -> None:
    """The executor has kernels for every device that can be named, and torch knows it by that name."""
    assert sorted(KERNELS_OF_DEVICE) == sorted(DEVICES)
    assert set(KERNELS_OF_DEVICE.values()) <= set(KERNEL_SETS)
    assert [torch.device(name).type for name in DEVICES] == list(DEVICES)


def test_passes() -> None:
    """Likewise the passes over a model's graph, in the order in which they run."""
    assert PASSES == PASS_NAMES
