"""CPU, memory and disk."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

from octavo.terminal.checks.finding import Finding, Level
from octavo.terminal.figures import counted, size

_SECTION = "machine"
_GIB = 1 << 30
_LEAST_MEMORY = _GIB // 2
"""Bytes without which not even the smallest model starts: torch alone takes half of them."""
_LITTLE_MEMORY = 2 * _GIB
_LEAST_DISK = _GIB // 8
"""Bytes that the smallest model takes."""
_LITTLE_DISK = 2 * _GIB
# Linux's names of what numeric code is chosen by, and how people write them.
_INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "amx_bf16": "AMX BF16",
    "amx_int8": "AMX INT8",
    "asimd": "NEON",
    "sve": "SVE",
    "bf16": "BF16",
}
_MULTIPLIES_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}
_FAST = {"avx2", "asimd"}


def check_machine(home: Path, root: Path = Path("/")) -> Iterator[Finding]:
    """Yield what there is of cores, instructions, memory and disk. `root` is where /proc and /sys are found."""
    yield _cpu(root)
    yield _memory(root)
    yield _disk(home)


def _cpu(root: Path) -> Finding:
    cores = len(os.sched_getaffinity(0))
    flags = _cpu_flags(root)
    known = [name for flag, name in _INSTRUCTIONS.items() if flag in flags]
    dtype = "bfloat16" if flags & _MULTIPLIES_BFLOAT16 else "float32"
    text = f"{counted(cores, 'core')}, {platform.machine()}"
    text += f" with {', '.join(known)}" if known else ""
    text += f"; --dtype auto takes {dtype}"
    if flags & _FAST:
        return Finding(_SECTION, "cpu", Level.OK, text)
    return Finding(_SECTION, "cpu", Level.NOTE, f"{text}; no vector instructions known, so it will be slow")


def _cpu_flags(root: Path) -> set[str]:
    for line in _lines(root / "proc/cpuinfo"):
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(value.split())
    return set()


def _memory(root: Path) -> Finding:
    fields = dict(line.split(":", 1) for line in _lines(root / "proc/meminfo") if ":" in line)
    try:
        total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (KeyError, ValueError, IndexError):
        return Finding(_SECTION, "memory", Level.NOTE, "unknown: there is no /proc/meminfo to read")
    text = f"{size(total)}, {size(available)} available"
    limit = _group_limit(root)
    if limit is not None and limit < total:
        available = min(available, limit)
        text += f"; this process may take {size(limit)}"
    if available < _LEAST_MEMORY:
        advice = "end other programs, or raise the memory limit of this container"
        return Finding(_SECTION, "memory", Level.PROBLEM, f"{text}: too little for any model", advice)
    if available < _LITTLE_MEMORY:
        advice = "a small model fits; give the executor what is left by --kv-memory"
        return Finding(_SECTION, "memory", Level.NOTE, text, advice)
    return Finding(_SECTION, "memory", Level.OK, text)


def _group_limit(root: Path) -> int | None:
    """Return the memory limit of the container, where this runs in one: control groups version 2 or 1."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        lines = _lines(root / "sys/fs/cgroup" / name)
        if lines and lines[0].isdecimal():
            return int(lines[0])
    return None


def _disk(home: Path) -> Finding:
    folder = next(path for path in (home, *home.parents) if path.exists())
    if not os.access(folder, os.W_OK | os.X_OK) or not folder.is_dir():
        advice = "make it writable, or set OCTAVO_HOME to a folder that is: models and logs go there"
        return Finding(_SECTION, "disk", Level.PROBLEM, f"{folder} cannot be written", advice)
    free = shutil.disk_usage(folder).free
    text = f"{size(free)} free at {home}"
    if free < _LEAST_DISK:
        return Finding(_SECTION, "disk", Level.PROBLEM, text, "free some, or set OCTAVO_HOME to a larger disk")
    if free < _LITTLE_DISK:
        return Finding(_SECTION, "disk", Level.NOTE, text, "enough for a small model only")
    return Finding(_SECTION, "disk", Level.OK, text)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
