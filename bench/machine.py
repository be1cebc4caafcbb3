"""What a benchmark has to say of the machine, and what processes on it used."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from octavo.bench.document import environment

_INSTRUCTIONS = (
    "avx2",
    "f16c",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "avx_vnni",
    "amx_bf16",
    "amx_int8",
)
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_TICKS = os.sysconf("SC_CLK_TCK")
_WINDOW = 0.5
"""Seconds."""
_IDLE_SHARE = 0.06
_IDLE_WINDOWS, _MOST_WINDOWS = 3, 60


def describe() -> dict[str, Any]:
    """Return what bears on the figures: processor, instruction sets, caches, memory, versions, the load just now."""
    flags = next((line for line in _lines(Path("/proc/cpuinfo")) if line.startswith("flags")), "").split()
    memory = next((line for line in _lines(Path("/proc/meminfo")) if line.startswith("MemTotal")), "0 0").split()[1]
    return environment() | {
        "instructions": [name for name in _INSTRUCTIONS if name in flags],
        "last_level_cache": _last_level_cache(),
        "memory_gib": round(int(memory) / 2**20, 1),
        "load_average": os.getloadavg()[0],
    }


def notes() -> list[str]:
    """Return what makes figures taken now doubtful."""
    load, cpus = os.getloadavg()[0], len(os.sched_getaffinity(0))
    return [f"this machine was busy before the run: a load average of {load:.1f} on {cpus} CPUs"] if load > 0.5 else []


def process_tree(pids: Iterable[int]) -> Iterator[int]:
    """Yield processes and all that descend from them and live."""
    for pid in pids:
        yield pid
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for task in Path(f"/proc/{pid}/task").iterdir():
                yield from process_tree(int(child) for child in (task / "children").read_text().split())


def peak_rss_mib(pids: Iterable[int]) -> float:
    """Return the sum of the peak resident sizes of processes and their descendants, MiB, since `forget_peaks`."""
    total = 0
    for pid in process_tree(pids):
        lines = _lines(Path(f"/proc/{pid}/status"))
        total += next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
    return total / 1024


def forget_peaks(pids: Iterable[int]) -> None:
    """Let peaks count from now on. Where the system does not allow it, they go on counting from the start."""
    for pid in process_tree(pids):
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time that processes and their living descendants have used."""
    total = 0
    for pid in process_tree(pids):
        with contextlib.suppress(OSError):
            # Behind the program's name, which may hold spaces: state is field 3, user and system time 14 and 15.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / _TICKS


async def wait_idle(pids: Collection[int]) -> None:
    """Wait until processes do nothing but wait, at most half a minute.

    A server that has answered goes on for a moment: Octavo's executor makes the memory of requests to come resident
    while it idles (executor_svc/kv_pages.py). Whoever has the next turn is to have the processors alone.
    """
    windows = 0
    for _ in range(_MOST_WINDOWS):
        before = cpu_seconds(pids)
        await asyncio.sleep(_WINDOW)
        windows = windows + 1 if cpu_seconds(pids) - before <= _IDLE_SHARE * _WINDOW else 0
        if windows == _IDLE_WINDOWS:
            return


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _last_level_cache() -> str:
    levels = sorted(_CACHES.glob("index*"))
    return "".join(_lines(levels[-1] / "size")) if levels else ""
