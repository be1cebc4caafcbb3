"""What the CPU can compute, and the dtype that follows from it."""

from __future__ import annotations

from pathlib import Path

import torch

BFLOAT16_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Names of instructions that multiply bfloat16, as Linux has them: two of x86, one of Arm."""
_COMPUTING = BFLOAT16_FEATURES | {
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512dq",
    "avx512_vnni",
    "avx512_fp16",
    "avx_vnni",
    "amx_int8",
    "asimd",
    "asimddp",
    "i8mm",
    "sve",
    "sve2",
}


def cpu_features(root: Path = Path("/")) -> frozenset[str]:
    """Return the features that numeric code is chosen by, in Linux's names; none where /proc/cpuinfo is missing."""
    try:
        text = (root / "proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return _COMPUTING.intersection(value.split())
    return frozenset()


def resolve_dtype(name: str, device: torch.device, features: frozenset[str]) -> torch.dtype:
    """Return the dtype of "float32", "bfloat16" or "auto".

    Auto is bfloat16 on a GPU and on a CPU that multiplies it; elsewhere float32, which is then faster. ValueError on
    another name.
    """
    if name == "auto":
        fast = device.type != "cpu" or bool(features & BFLOAT16_FEATURES)
        return torch.bfloat16 if fast else torch.float32
    if name in ("float32", "bfloat16"):
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    raise ValueError(f"unknown dtype {name!r}; known: auto, float32, bfloat16")
