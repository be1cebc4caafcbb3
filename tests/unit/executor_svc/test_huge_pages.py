"""Huge pages: advice that the system took, and memory that is none of ours."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from executor_svc.huge_pages import advise_huge_pages
from executor_svc.kv_cache import KVCache

linux_only = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no transparent huge pages"
)


class Shape:
    """Of a model whose KV blocks are large."""

    num_layers = 1
    num_kv_heads = 8
    head_dim = 64


def _flags(address: int) -> list[str]:
    """What the kernel says of the mapping that holds an address, see proc_pid_smaps(5)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    return []


@linux_only
def test_the_kv_memory_is_marked() -> None:
    """Keys and values of every layer lie in memory that the kernel backs by huge pages where it can."""
    cache = KVCache.allocate(Shape(), 256, 16, torch.float32, torch.device("cpu"))
    for tensor in (*cache.keys, *cache.values):
        assert "hg" in _flags(tensor.data_ptr() + tensor.nbytes // 2)


@linux_only
def test_only_whole_pages_are_marked() -> None:
    """A tensor inside one page is left alone; one of several pages keeps what lies around it and its own content."""
    assert not advise_huge_pages(torch.empty(16))
    whole = torch.arange(1 << 20, dtype=torch.int32)
    assert advise_huge_pages(whole[1000:-1000])
    assert torch.equal(whole, torch.arange(1 << 20, dtype=torch.int32))


def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """On other systems the memory is used as it is."""
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not advise_huge_pages(torch.empty(1 << 20))
