"""Free memory as the machine and the control groups have it, on file trees made for the purpose."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor_svc.memory import KV_MEMORY_SHARE, available_memory, default_kv_memory

MIB = 1 << 20


def _machine(root: Path, *, available_mib: int, cgroup: str) -> None:
    _write(root / "proc/meminfo", f"MemTotal: 99999999 kB\nMemFree: 5 kB\nMemAvailable: {available_mib * 1024} kB\n")
    _write(root / "proc/self/cgroup", cgroup)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _group_v2(group: Path, *, limit: str, usage: int, cache: int = 0) -> None:
    _write(group / "memory.max", f"{limit}\n")
    _write(group / "memory.current", f"{usage}\n")
    _write(group / "memory.stat", f"anon 1\ninactive_file {cache}\n")


def _group_v1(group: Path, *, limit: int, usage: int, cache: int = 0) -> None:
    _write(group / "memory.limit_in_bytes", f"{limit}\n")
    _write(group / "memory.usage_in_bytes", f"{usage}\n")
    _write(group / "memory.stat", f"inactive_file 7\ntotal_inactive_file {cache}\n")


def test_without_groups_the_machine_counts(tmp_path: Path) -> None:
    """MemAvailable is the answer where no group has a limit."""
    _machine(tmp_path, available_mib=900, cgroup="0::/user.slice\n")
    _group_v2(tmp_path / "sys/fs/cgroup/user.slice", limit="max", usage=5)
    assert available_memory(tmp_path) == 900 * MIB


def test_a_v2_limit_counts_less_usage_plus_cache(tmp_path: Path) -> None:
    """The group's headroom is limit - usage + page cache that can be dropped."""
    _machine(tmp_path, available_mib=900, cgroup="0::/pod\n")
    _group_v2(tmp_path / "sys/fs/cgroup/pod", limit=str(512 * MIB), usage=100 * MIB, cache=30 * MIB)
    assert available_memory(tmp_path) == 442 * MIB


def test_a_limit_further_up_counts(tmp_path: Path) -> None:
    """The tightest group on the way to the top decides."""
    _machine(tmp_path, available_mib=900, cgroup="0::/pod/container\n")
    _group_v2(tmp_path / "sys/fs/cgroup/pod/container", limit=str(800 * MIB), usage=0)
    _group_v2(tmp_path / "sys/fs/cgroup/pod", limit=str(300 * MIB), usage=MIB)
    assert available_memory(tmp_path) == 299 * MIB


def test_a_v1_limit_counts(tmp_path: Path) -> None:
    """The memory controller of version 1 is found among the others; its huge default is no limit."""
    _machine(tmp_path, available_mib=900, cgroup="5:cpu,cpuacct:/pod\n4:memory:/pod\n0::/\n")
    _group_v1(tmp_path / "sys/fs/cgroup/memory/pod", limit=400 * MIB, usage=50 * MIB, cache=10 * MIB)
    _group_v1(tmp_path / "sys/fs/cgroup/memory", limit=9223372036854771712, usage=600 * MIB)
    assert available_memory(tmp_path) == 360 * MIB


def test_inside_a_container_the_top_directory_is_the_group(tmp_path: Path) -> None:
    """Where the group's path is the host's and not mounted, the limit at the top counts."""
    _machine(tmp_path, available_mib=900, cgroup="4:memory:/docker/0123\n")
    _group_v1(tmp_path / "sys/fs/cgroup/memory", limit=200 * MIB, usage=50 * MIB)
    assert available_memory(tmp_path) == 150 * MIB


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    """Headroom is never negative."""
    _machine(tmp_path, available_mib=900, cgroup="0::/\n")
    _group_v2(tmp_path / "sys/fs/cgroup", limit=str(100 * MIB), usage=200 * MIB)
    assert available_memory(tmp_path) == 0


def test_kv_memory_is_a_share(tmp_path: Path) -> None:
    """The default for KV blocks leaves the stated share to others."""
    _machine(tmp_path, available_mib=1000, cgroup="")
    assert default_kv_memory(tmp_path) == int(1000 * MIB * KV_MEMORY_SHARE)


def test_this_machine_has_memory() -> None:
    """On the machine of the test the answer is a number of bytes that makes sense."""
    assert MIB < available_memory() < 1 << 50


def test_a_kernel_without_the_line_is_an_error(tmp_path: Path) -> None:
    """No MemAvailable: an error, not a guess."""
    _write(tmp_path / "proc/meminfo", "MemTotal: 5 kB\n")
    with pytest.raises(OSError, match="MemAvailable"):
        available_memory(tmp_path)
