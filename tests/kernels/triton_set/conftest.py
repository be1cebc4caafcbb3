"""Test bodies of the other sets, run over the Triton set: in this folder these fixtures stand for theirs."""

from __future__ import annotations

import pytest

from executor_svc.kernels import KernelSet


@pytest.fixture(scope="session")
def triton_set() -> KernelSet:
    """The Triton set, interpreted."""
    pytest.importorskip("triton", reason="Triton has no build for this platform")
    from triton_interpreter import interpreted

    return interpreted()


@pytest.fixture(scope="session")
def kernels(triton_set: KernelSet) -> KernelSet:
    """In place of the sets that a plain body runs over."""
    return triton_set


@pytest.fixture(scope="session")
def compiled(triton_set: KernelSet) -> KernelSet:
    """In place of the compiled kernels."""
    return triton_set


@pytest.fixture(scope="session")
def any_set(triton_set: KernelSet) -> KernelSet:
    """In place of every set."""
    return triton_set
