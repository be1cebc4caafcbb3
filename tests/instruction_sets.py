"""The compiled kernels, once for every instruction set; those that this processor does not run are skipped."""

from __future__ import annotations

from typing import Any

import pytest

from executor_svc.cpu_features import cpu_features
from executor_svc.kernels.native.isa import INSTRUCTION_SETS, InstructionSet, emulating_amx, runnable

_SKIPPED = "this processor does not run "


def instruction_set_param(isa: InstructionSet, value: object = None) -> Any:
    """Return a parameter, `isa` itself or else `value`, whose tests are skipped where the set does not run."""
    runs = isa.features <= cpu_features()
    marks = () if runs else pytest.mark.skip(reason=f"{_SKIPPED}{isa.name}, nor any test of this file for it")
    return pytest.param(isa if value is None else value, id=isa.name, marks=marks)


each_instruction_set = pytest.mark.parametrize("isa", [instruction_set_param(isa) for isa in INSTRUCTION_SETS])
"""Gives a test its `isa`, an InstructionSet."""
each_library = pytest.mark.parametrize(
    "isa", [instruction_set_param(isa) for isa in (*INSTRUCTION_SETS, emulating_amx(runnable(cpu_features())[-1]))]
)
"""The same, and the code for AMX's tiles with the tiles in plain C++."""


def repeated_skips(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that would say what another of their file says already: one for each missing set is enough."""
    said = set()
    repeated = []
    for item in items:
        reasons = [mark.kwargs.get("reason", "") for mark in item.iter_markers("skip")]
        missing = next((reason for reason in reasons if reason.startswith(_SKIPPED)), None)
        if missing is None:
            continue
        if (item.path, missing) in said:
            repeated.append(item)
        said.add((item.path, missing))
    return repeated
