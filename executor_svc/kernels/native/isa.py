"""Instruction sets that the kernels are built for, and the choice among them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from executor_svc.cpu_features import cpu_features

FORCED_BY = "OCTAVO_CPU_ISA"
"""Environment variable that names a lower set than the best one."""


@dataclass(frozen=True)
class InstructionSet:
    """One set: the same sources, compiled with these flags."""

    name: str
    features: frozenset[str]
    """What a processor must have, in Linux's names."""
    flags: tuple[str, ...]


# Outside `generic` a product and a sum are fused where the source says so and nowhere else, so that a result does not
# depend on what the compiler made of a loop.
_PORTABLE = InstructionSet("generic", frozenset(), ("-ffp-contract=fast",))
_AVX2 = InstructionSet("avx2", frozenset({"avx2", "fma", "f16c"}), ("-ffp-contract=off", "-mavx2", "-mfma", "-mf16c"))
_AVX512 = InstructionSet(
    "avx512",
    _AVX2.features | {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    # g++ 12 warns of its own header here (GCC bug 105593).
    (
        *_AVX2.flags,
        "-mavx512f",
        "-mavx512bw",
        "-mavx512vl",
        "-mavx512dq",
        "-Wno-uninitialized",
        "-Wno-maybe-uninitialized",
    ),
)
_AVX512_BF16 = InstructionSet("avx512_bf16", _AVX512.features | {"avx512_bf16"}, (*_AVX512.flags, "-mavx512bf16"))
_AMX = InstructionSet("amx", _AVX512_BF16.features | {"amx_bf16"}, (*_AVX512_BF16.flags, "-mamx-tile", "-mamx-bf16"))

INSTRUCTION_SETS = (_PORTABLE, _AVX2, _AVX512, _AVX512_BF16, _AMX)
"""From the lowest to the highest; each runs wherever a higher one does."""


class InstructionSetError(ValueError):
    """The set that was asked for is unknown, or this processor does not run it."""


def runnable(features: frozenset[str]) -> tuple[InstructionSet, ...]:
    """Return the sets that a processor with these features runs, from the lowest to the highest."""
    return tuple(isa for isa in INSTRUCTION_SETS if isa.features <= features)


def choose(features: frozenset[str] | None = None, environment: Mapping[str, str] = os.environ) -> InstructionSet:
    """Return the set that the environment forces, or else the highest that runs.

    `features` are this machine's by default. Raises InstructionSetError, which names the sets that would do.
    """
    sets = runnable(cpu_features() if features is None else features)
    forced = environment.get(FORCED_BY)
    if not forced:
        return sets[-1]
    for isa in sets:
        if isa.name == forced:
            return isa
    known = any(isa.name == forced for isa in INSTRUCTION_SETS)
    problem = "this processor does not run it" if known else "unknown"
    raise InstructionSetError(f"{FORCED_BY}={forced}: {problem}; here run {', '.join(isa.name for isa in sets)}")


def emulating_amx(isa: InstructionSet) -> InstructionSet:
    """Return a set that takes the code for AMX's tiles, the tiles themselves in plain C++: slow, for tests."""
    return InstructionSet(f"{isa.name}-amx-emulated", isa.features, (*isa.flags, "-DOCTAVO_EMULATE_AMX"))
