"""What keeps the Triton set from running is said, with what to change."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from executor_svc.kernels import build_kernels
from executor_svc.kernels.sets import triton as triton_set
from executor_svc.kernels.sets.triton import GpuUnusableError, check_triton, find_gpu

CUDA = torch.device("cuda")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A card that torch finds; tests change its figures."""
    card = SimpleNamespace(
        name="a card", major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232_448
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    return card


def test_a_cpu_is_no_place_for_it() -> None:
    """Named with a device that is no GPU, by default the CPU, the set says which sets run there."""
    with pytest.raises(GpuUnusableError, match="run on GPUs, not on cpu; take --kernels cpu or reference"):
        build_kernels("triton")


def test_a_build_of_torch_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CUDA in torch no driver helps: another build of torch does."""
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(GpuUnusableError, match="built for CPUs alone; install one with CUDA, as constraints-gpu"):
        find_gpu(CUDA)


def test_no_driver(card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch finds no card, the driver and what hides cards are named, with the CUDA that the driver must know."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(GpuUnusableError, match=r"finds no GPU; .*nvidia-smi.*CUDA 13\.0.*CUDA_VISIBLE_DEVICES"):
        find_gpu(CUDA)


def test_a_card_that_does_not_start(card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver says of it is kept, in a line."""

    def fails(device: torch.device) -> None:
        raise RuntimeError("CUDA error: system not yet initialized\nSearch for ...")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fails)
    with pytest.raises(GpuUnusableError, match=r"GPU 0 does not start: CUDA error: system not yet initialized; see "):
        find_gpu(CUDA)


def test_a_card_that_is_not_there(card: SimpleNamespace) -> None:
    """A number past the last card is told with how many there are."""
    with pytest.raises(GpuUnusableError, match="there is no GPU 3; 1 can be seen"):
        find_gpu(torch.device("cuda:3"))


@pytest.mark.parametrize(("major", "minor"), [(7, 5), (6, 0)])
def test_a_card_that_is_too_old(card: SimpleNamespace, major: int, minor: int) -> None:
    """The card, what it has and what it would need."""
    card.major, card.minor = major, minor
    with pytest.raises(GpuUnusableError, match=rf"a card has compute capability {major}\.{minor}; .* need 8\.0"):
        find_gpu(CUDA)


def test_a_card_that_will_do(card: SimpleNamespace) -> None:
    """Its figures are what the kernels are launched by."""
    gpu = find_gpu(CUDA)
    assert (gpu.name, gpu.processors, gpu.shared_bytes) == ("a card", 132, 232_448)


@pytest.mark.parametrize("version", ["3.5.1", "2.3.0", "3.5.0+git1234"])
def test_a_triton_that_is_too_old(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """The version that is there, and which to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(GpuUnusableError, match=r"Triton .* is too old; install triton>=3\.6"):
        check_triton()


def test_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing, it is named with the extra that brings it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(GpuUnusableError, match=r"Triton is not installed; .*octavo\[gpu\]"):
        check_triton()


@pytest.mark.parametrize("version", ["3.6.0", "3.10.1", "4.0.0"])
def test_a_triton_that_will_do(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """From 3.6 on all are taken, 3.10 too, which a comparison of texts would refuse."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    check_triton()


def test_a_triton_of_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds for AMD's cards, and some vendors' own, are distributed as something else: the package itself is asked."""

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.5.0+rocm"))
    with pytest.raises(GpuUnusableError, match=r"Triton 3\.5\.0\+rocm is too old; install triton>=3\.6"):
        check_triton()


def test_products_are_summed_in_float32(card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The set turns off torch's leave to add up 16-bit products in 16 bits."""
    made: list[Any] = []
    monkeypatch.setattr(triton_set, "assemble", made.append)
    monkeypatch.setattr(triton_set, "check_triton", lambda: None)
    products = torch.backends.cuda.matmul
    before = products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction
    products.allow_bf16_reduced_precision_reduction = products.allow_fp16_reduced_precision_reduction = True
    triton_set.build(CUDA)
    assert made[0].name == "a card"
    assert not products.allow_bf16_reduced_precision_reduction
    assert not products.allow_fp16_reduced_precision_reduction
    products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction = before
