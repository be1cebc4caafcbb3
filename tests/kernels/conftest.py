"""The kernel sets that tests run over."""

from __future__ import annotations

import pytest
from instruction_sets import instruction_set_param

from executor_svc.kernels import KernelSet, build_kernels
from executor_svc.kernels.native.isa import FORCED_BY, INSTRUCTION_SETS

_COMPILED = [instruction_set_param(isa, isa.name) for isa in INSTRUCTION_SETS]


def _build(name: str) -> KernelSet:
    if name == "reference":
        return build_kernels(name)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(FORCED_BY, name)
        return build_kernels("cpu")


@pytest.fixture(scope="session", params=["reference", *_COMPILED])
def any_set(request: pytest.FixtureRequest) -> KernelSet:
    """The reference, and the compiled kernels of every instruction set."""
    return _build(request.param)


@pytest.fixture(scope="session", params=_COMPILED)
def compiled(request: pytest.FixtureRequest) -> KernelSet:
    """The compiled kernels of every instruction set that this machine runs; the others are skipped."""
    return _build(request.param)
