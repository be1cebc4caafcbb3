"""The compiled kernels, once for every instruction set that this processor runs."""

from __future__ import annotations

import pytest

from executor_svc.cpu_features import cpu_features
from executor_svc.kernels.native.isa import INSTRUCTION_SETS, runnable

_here = runnable(cpu_features())

each_instruction_set = pytest.mark.parametrize(
    "isa",
    [
        pytest.param(
            isa,
            id=isa.name,
            marks=() if isa in _here else pytest.mark.skip(reason=f"this processor does not run {isa.name}"),
        )
        for isa in INSTRUCTION_SETS
    ],
)
"""Gives a test its `isa`, an InstructionSet."""
