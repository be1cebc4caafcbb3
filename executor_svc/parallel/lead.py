"""Rank 0's model, which has the other ranks do what it does, and what they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from executor_svc.attention import AttentionMetadata
from executor_svc.device import Device, Graph
from executor_svc.kv_cache import KVCache
from executor_svc.kv_pages import KvPages
from executor_svc.parallel.carrier import Carrier, HostCarrier
from executor_svc.parallel.group import Group
from executor_svc.parallel.messages import Kind, decode_number, encode_number
from executor_svc.parallel.share import Share
from executor_svc.parallel.vocabulary import DividedVocabulary
from executor_svc.parallel.watch import Watch, guarded


class RankModel(Protocol):
    """One rank's part of a model. See CausalLM."""

    @property
    def head(self) -> object:
        """A DividedVocabulary."""

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, kv_cache: KVCache) -> Tensor:
        """Give the last hidden states."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Give the logits; on rank 0."""

    def likeliest(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """Give the likeliest tokens; on rank 0."""


class ConnectedRanks:
    """See Ranks."""

    def __init__(self, group: Group, watch: Watch, carrier: Carrier | None = None) -> None:
        """`carrier`: of the device that the model is on; without it that is the CPU."""
        self.group = group
        self.watch = watch
        self.carrier = HostCarrier(watch) if carrier is None else carrier

    @property
    def share(self) -> Share:
        """Which rank this is."""
        return self.group.share

    def sum(self, x: Tensor) -> None:
        """See Ranks."""
        self.group.sum(x)

    def gather(self, x: Tensor) -> list[Tensor]:
        """See Ranks."""
        return self.group.gather(x)

    def ask(self, kind: Kind, x: Tensor) -> None:
        """See Ranks."""
        self.carrier.tell_rows(kind, x)


class LeadingModel:
    """Rank 0's: to whoever runs it a model as any other. Called on one thread."""

    def __init__(self, model: RankModel, ranks: ConnectedRanks) -> None:
        self._model = model
        self._watch = ranks.watch
        self._carrier = ranks.carrier

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, kv_cache: KVCache) -> Tensor:
        """See CausalLM."""
        with guarded(self._watch, 0):
            self._carrier.tell_step(token_ids, metadata)
            return self._model.forward(token_ids, metadata, kv_cache)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See CausalLM."""
        with guarded(self._watch, 0):
            return self._model.compute_logits(hidden)

    def likeliest(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """See CausalLM."""
        with guarded(self._watch, 0):
            return self._model.likeliest(hidden)


class LeadingGraphs:
    """Rank 0's graphs of what LeadingModel does: the other ranks capture theirs with it, and replay them with it."""

    def __init__(self, device: Device, watch: Watch) -> None:
        self._device = device
        self._watch = watch
        self._count = 0

    def capture(self, launch: Callable[[], None]) -> Graph:
        """See Device. An error is a loss: the others are in the middle of theirs."""
        with guarded(self._watch, 0):
            self._watch.tell(Kind.CAPTURE)
            graph = self._device.capture(launch)
            self._watch.tell(Kind.CAPTURED)
        number, self._count = self._count, self._count + 1
        return _LeadingGraph(graph, number, self._watch)


class _LeadingGraph:
    def __init__(self, graph: Graph, number: int, watch: Watch) -> None:
        self._graph = graph
        self._number = number
        self._watch = watch

    def replay(self) -> None:
        """See Graph."""
        with guarded(self._watch, 0):
            self._watch.tell(Kind.REPLAY, encode_number(self._number))
            self._graph.replay()


class Follower:
    """A rank that is not the first: does what rank 0 tells, in order."""

    def __init__(
        self,
        model: RankModel,
        kv_cache: KVCache,
        ranks: ConnectedRanks,
        *,
        pages: KvPages | None = None,
        device: Device | None = None,
    ) -> None:
        """`pages`: is told of each step. `device`: where the model is no CPU's, what captures its graphs."""
        assert isinstance(model.head, DividedVocabulary)  # the loader
        self._model = model
        self._head = model.head
        self._kv_cache = kv_cache
        self._ranks = ranks
        self._pages = pages
        self._device = device
        self._graphs: list[Graph] = []
        self._has_ended = False

    @property
    def num_blocks(self) -> int:
        """KV blocks that it holds."""
        return self._kv_cache.num_blocks

    def follow(self, until: Kind = Kind.END) -> None:
        """Return once rank 0 tells `until`, or END. On a device the caller makes a stream the current one."""
        with torch.inference_mode():
            while not self._has_ended:
                kind, message = self._ranks.watch.received.get()
                self._has_ended = kind is Kind.END
                if kind in (until, Kind.END):
                    return
                with guarded(self._ranks.watch, self._ranks.share.rank):
                    self._do(kind, message)

    def _do(self, kind: Kind, message: bytearray) -> None:
        match kind:
            case Kind.STEP:
                self._step(message)
            case Kind.CAPTURE:
                assert self._device is not None  # rank 0 has one
                self._graphs.append(self._device.capture(lambda: self.follow(Kind.CAPTURED)))
            case Kind.REPLAY:
                self._graphs[decode_number(message)].replay()
            case _:
                self._head.answer(kind, self._ranks.carrier.take_rows(message))

    def _step(self, message: bytearray) -> None:
        token_ids, metadata = self._ranks.carrier.take_step(message)
        pages, kv_cache = self._pages, self._kv_cache
        if pages is not None:
            pages.begin([int(metadata.slot_mapping.max()) // kv_cache.block_size])
        try:
            self._model.forward(token_ids, metadata, kv_cache)
        finally:
            if pages is not None:
                pages.end()
