"""Pages of KV memory that are there before a step writes to them."""

from __future__ import annotations

import gc
import queue
import resource
import sys
import threading
import weakref

import pytest
import torch

from executor_svc.huge_pages import make_resident
from executor_svc.kv_cache import KVCache
from executor_svc.kv_pages import KvPages

TIMEOUT = 30.0
BLOCK_BYTES = 16 * 8 * 64 * 4
"""Of one layer's keys: 32 KiB, 64 blocks to a huge page."""


class Shape:
    """Of a model whose KV blocks are large."""

    num_layers = 2
    num_kv_heads = 8
    head_dim = 64


class Clock:
    """Stands until it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now


def _pages(num_blocks: int, ahead_blocks: int) -> tuple[KVCache, KvPages, Clock]:
    clock = Clock()
    cache = KVCache.allocate(Shape(), num_blocks, 16, torch.float32, torch.device("cpu"))
    return cache, KvPages(cache, ahead_blocks * BLOCK_BYTES * 4, clock), clock


def _faults_of_writing(tensor: torch.Tensor) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensor.fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(not make_resident(torch.empty(1 << 20)), reason="this system has no MADV_POPULATE_WRITE")
def test_resident_pages_are_written_to_without_a_fault() -> None:
    """Nothing is found at the write, and what the memory held is what it holds."""
    some = torch.arange(8 << 20, dtype=torch.float32)
    assert make_resident(some[1001:-1001])
    assert torch.equal(some, torch.arange(8 << 20, dtype=torch.float32))
    fresh = torch.empty(8 << 20, dtype=torch.float32)
    assert make_resident(fresh)
    assert _faults_of_writing(fresh) < 16


def test_an_idle_device_has_a_stretch_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whole huge pages of each layer; beyond the highest block in use, and never beyond the memory."""
    asked: list[int] = []
    monkeypatch.setattr("executor_svc.kv_pages.make_resident", lambda tensor: asked.append(tensor.nbytes) or True)
    _, pages, clock = _pages(1000, 200)
    clock.now = 1.0
    assert pages.catch_up()
    assert pages.num_resident_blocks == 256
    assert asked == [64 * BLOCK_BYTES] * 4 * 4
    pages.begin((1, 400, 2))
    pages.end()
    clock.now = 2.0
    assert pages.catch_up()
    assert pages.num_resident_blocks == 640
    pages.begin((900,))
    pages.end()
    clock.now = 3.0
    assert not pages.catch_up(), "all of it is resident"
    assert pages.num_resident_blocks == 1000
    assert sum(asked) == 1000 * 4 * BLOCK_BYTES


def test_while_steps_run_only_the_next_pages_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that runs, and a gap as between two steps, leave the device's processors alone."""
    monkeypatch.setattr("executor_svc.kv_pages.make_resident", lambda tensor: True)
    _, pages, clock = _pages(1000, 200)
    pages.begin((1, 2, 3))
    clock.now = 100.0
    assert pages.catch_up()
    assert pages.num_resident_blocks == 128, "block 3, and a huge page's blocks behind it"
    pages.end()
    clock.now += 0.01
    pages.catch_up()
    assert pages.num_resident_blocks == 128
    clock.now += 1.0
    pages.catch_up()
    assert pages.num_resident_blocks == 256


def test_a_step_that_begins_has_the_processors_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the next pages are there, the rest of a stretch waits until the device idles again."""
    asked: list[int] = []

    def ask(tensor: torch.Tensor) -> bool:
        asked.append(tensor.nbytes)
        if len(asked) == 4 * 2 + 3:
            pages.begin((10,))
        return True

    monkeypatch.setattr("executor_svc.kv_pages.make_resident", ask)
    _, pages, clock = _pages(1000, 200)
    clock.now = 1.0
    assert pages.catch_up()
    assert (len(asked), pages.num_resident_blocks) == (11, 128)
    pages.begin((120,))
    assert pages.catch_up()
    assert pages.num_resident_blocks == 192, "a step comes near"
    pages.end()
    clock.now = 2.0
    assert pages.catch_up()
    assert pages.num_resident_blocks == 384


@pytest.mark.parametrize("block", [64, 100])
def test_a_step_that_comes_near_wakes_the_thread(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """It does not wait for the next look; nor does its end."""
    asked: queue.SimpleQueue[int] = queue.SimpleQueue()
    monkeypatch.setattr("executor_svc.kv_pages._LOOK_SECONDS", 3600.0)
    monkeypatch.setattr("executor_svc.kv_pages.make_resident", lambda tensor: asked.put(tensor.nbytes) or True)
    _, pages, _ = _pages(1000, 200)
    pages.start()
    try:
        for _ in range(4 * 2):
            asked.get(timeout=TIMEOUT)
        pages.begin((block,))
        for _ in range(4):
            asked.get(timeout=TIMEOUT)
    finally:
        pages.stop()
    assert asked.empty()


def test_a_system_that_cannot_do_it_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages then come at the first write, as everywhere; the thread ends by itself."""
    monkeypatch.setattr(sys, "platform", "darwin")
    _, pages, clock = _pages(100, 50)
    clock.now = 1.0
    assert not pages.catch_up()
    assert pages.num_resident_blocks == 0
    pages.start()
    pages.stop()


def test_the_stretch_follows_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """After steps that never came near its end, too: else one to come would."""
    asked: queue.Queue[int] = queue.Queue()

    def ask(tensor: torch.Tensor) -> bool:
        asked.put(tensor.nbytes)
        return True

    monkeypatch.setattr("executor_svc.kv_pages.make_resident", ask)
    monkeypatch.setattr("executor_svc.kv_pages._LOOK_SECONDS", 0.001)
    _, pages, clock = _pages(1000, 200)
    clock.now = 1.0
    pages.start()
    try:
        for _ in range(4 * 4):
            asked.get(timeout=TIMEOUT)
        with pytest.raises(queue.Empty):
            asked.get(timeout=0.05)  # time in which the thread finds that there is no more to do
        pages.begin((100,))
        pages.end()
        clock.now = 2.0
        for _ in range(4):
            asked.get(timeout=TIMEOUT)
    finally:
        pages.stop()


def test_a_stopped_thread_holds_no_memory() -> None:
    """Stop ends it, whatever it waits for, and may be called again, or without a start."""
    cache, pages, clock = _pages(1000, 64)
    clock.now = 1.0
    pages.start()
    pages.begin((100,))
    pages.end()
    pages.stop()
    pages.stop()
    assert "kv-pages" not in {thread.name for thread in threading.enumerate()}
    memory = weakref.ref(cache.keys[0])
    del cache, pages
    gc.collect()
    assert memory() is None
    _pages(10, 4)[1].stop()
