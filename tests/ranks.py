"""Ranks of one executor as threads of one process: real sums by gloo, real connections, real messages; no start of
Python for each.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from paged import PagedLoop
from torch.distributed import HashStore

from executor_svc.kv_cache import KVCache
from executor_svc.models import CausalLM
from executor_svc.parallel.connection import Connection
from executor_svc.parallel.group import Group
from executor_svc.parallel.lead import ConnectedRanks, Follower, LeadingModel
from executor_svc.parallel.messages import Kind
from executor_svc.parallel.share import Share
from executor_svc.parallel.watch import Watch

TIMEOUT = 100.0
Load = Callable[[ConnectedRanks], CausalLM]


def connections(size: int) -> tuple[dict[int, Connection], list[Connection]]:
    """Return rank 0's ends by rank, and the other ends in the order of ranks."""
    ours, theirs = {}, []
    with socket.create_server(("127.0.0.1", 0)) as server:
        for rank in range(1, size):
            theirs.append(Connection(socket.create_connection(server.getsockname())))
            ours[rank] = Connection(server.accept()[0])
    return ours, theirs


def run_ranks(size: int, body: Callable[[ConnectedRanks], Any], *, in_order: bool = True) -> list[Any]:
    """Run a body on each rank and return what they gave. An error of one is raised, the others' connections closed."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store, (ours, theirs) = HashStore(), connections(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []
    watches = [Watch(ours, lambda: None), *(Watch({0: end}, lambda: None) for end in theirs)]
    for watch in watches:
        watch.start()

    def run(rank: int) -> None:
        try:
            group = Group(store, Share(rank, size), in_order=in_order)
            results[rank] = body(ConnectedRanks(group, watches[rank]))
        except BaseException as error:
            errors.append(error)
            # A follower that waits for a message then ends.
            for watch in watches:
                watch.received.put((Kind.END, bytearray()))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    for watch in watches:
        watch.finish()
        watch.close()
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    return results


class LeadingLoop:
    """A PagedLoop on rank 0, and the other ranks behind it, each over KV memory full of NaN."""

    def __init__(self, size: int, load: Load, *, block_size: int = 8) -> None:
        """`load`: the part of a rank."""
        self._size = size
        self._load = load
        self._block_size = block_size

    def run(self, body: Callable[[PagedLoop], Any]) -> Any:
        """Return what the body does with the loop."""
        return run_ranks(self._size, lambda ranks: self._rank(ranks, body))[0]

    def _rank(self, ranks: ConnectedRanks, body: Callable[[PagedLoop], Any]) -> Any:
        model = self._load(ranks)
        if ranks.share.rank == 0:
            result = body(PagedLoop(_Leading(model, ranks), num_blocks=64, block_size=self._block_size))
            ranks.watch.finish()
            return result
        kv_cache = KVCache.allocate(model.config, 64, self._block_size, model.dtype, torch.device("cpu"))
        for tensor in (*kv_cache.keys, *kv_cache.values):
            tensor.fill_(torch.nan)
        Follower(model, kv_cache, ranks).follow()
        return None


def generate(
    size: int, load: Load, prompts: Sequence[Sequence[int]], num_tokens: int, *, chunk: int
) -> list[list[int]]:
    """Decode greedily as PagedLoop.generate does."""
    tokens: list[list[int]] = LeadingLoop(size, load).run(lambda loop: loop.generate(prompts, num_tokens, chunk=chunk))
    return tokens


class _Leading(LeadingModel):
    """With the config that PagedLoop asks for."""

    def __init__(self, model: CausalLM, ranks: ConnectedRanks) -> None:
        super().__init__(model, ranks)
        self.config = model.config
        self.code = model.code
