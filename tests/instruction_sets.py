"""The compiled kernels, once for every instruction set; those that this processor does not run are skipped."""

from __future__ import annotations

from typing import Any

import pytest

from executor_svc.cpu_features import cpu_features
from executor_svc.kernels.native.isa import INSTRUCTION_SETS, InstructionSet, emulating_amx, runnable

_SKIPPED = "this processor does not run "


def libraries(features: frozenset[str]) -> tuple[InstructionSet, ...]:
    """Return all that a processor with these features can load: its sets, and the code for AMX's tiles in plain C++."""
    sets = runnable(features)
    return (emulating_amx(sets[-1]), *sets)


def everyday(features: frozenset[str]) -> tuple[InstructionSet, ...]:
    """Return what `make test` compiles and runs, for compiling takes long: the highest set, AVX2 that every server has,
    and AMX's tiles where the processor has none. `make test-full` runs all.
    """
    emulated, *sets = libraries(features)
    chosen = [isa for isa in sets if isa is sets[-1] or isa.name == "avx2"]
    return tuple(chosen if sets[-1] is INSTRUCTION_SETS[-1] else [emulated, *chosen])


def instruction_set_param(isa: InstructionSet, value: object = None) -> Any:
    """Return a parameter, `isa` itself or else `value`, whose tests are skipped where the set does not run, and left to
    `make test-full` where it is none of every day.
    """
    marks = [] if isa in everyday(cpu_features()) else [pytest.mark.full]
    if not isa.features <= cpu_features():
        marks = [pytest.mark.skip(reason=f"{_SKIPPED}{isa.name}, nor any test of this file for it")]
    return pytest.param(isa if value is None else value, id=isa.name, marks=marks)


each_instruction_set = pytest.mark.parametrize("isa", [instruction_set_param(isa) for isa in INSTRUCTION_SETS])
"""Gives a test its `isa`, an InstructionSet."""
each_library = pytest.mark.parametrize(
    "isa", [instruction_set_param(isa) for isa in (*INSTRUCTION_SETS, libraries(cpu_features())[0])]
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
