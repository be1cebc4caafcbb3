"""How much memory this process can still take: what the machine has available, and what its control groups allow."""

from __future__ import annotations

from pathlib import Path

KV_MEMORY_SHARE = 0.6
"""Share of the available memory that KV blocks get when nobody says how much; the rest is for activations and others.
"""


def default_kv_memory(root: Path = Path("/")) -> int:
    """Bytes to give to KV blocks once the weights are loaded, where no setting says."""
    return int(available_memory(root) * KV_MEMORY_SHARE)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be taken without swapping or being killed: the least of MemAvailable and every group's headroom.

    `root` is where /proc and /sys are found. Page cache counts as available: it is dropped on need. Raises OSError
    where there is no /proc/meminfo.
    """
    return min([_machine(root), *_groups(root)])


def _machine(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable (Linux 3.14 and later have it)")


def _groups(root: Path) -> list[int]:
    """Return the headroom of this process's memory group and of those around it, as far as they have limits."""
    headrooms = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, names = (
                root / "sys/fs/cgroup/memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            )
        else:
            continue
        # Inside a container the path may be the host's: then only the top directory, the container's own, exists here.
        inner = top / path.lstrip("/")
        for group in (inner, *inner.parents):
            headrooms.append(_headroom(group, *names))
            if group == top:
                break
    return [headroom for headroom in headrooms if headroom is not None]


def _headroom(group: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    limit, usage = _lines(group / limit_name), _lines(group / usage_name)
    if not limit or not usage or limit[0] == "max":
        return None
    statistics = dict(line.split() for line in _lines(group / "memory.stat"))
    cache = int(statistics.get(cache_name, 0))
    return max(0, int(limit[0]) - int(usage[0]) + cache)


def _lines(path: Path) -> list[str]:
    """Return a file's lines; none where it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
