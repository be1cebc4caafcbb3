"""How long a process has waited for a processor, which is the machine's share of any time that is measured of it."""

from __future__ import annotations

from pathlib import Path


def waited(pid: int) -> float:
    """Return the seconds that the living threads of a process were ready to run and did not, by the kernel's count.

    0 where the kernel does not tell (/proc/PID/task/TID/schedstat).
    """
    total = 0
    for schedstat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            total += int(schedstat.read_text().split()[1])
        except (OSError, IndexError):  # a thread that has just ended, a kernel that does not count
            continue
    return total / 1e9
