"""Rank 0's model, which has the other ranks do what it does, and what they do."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from executor_svc.attention import AttentionMetadata
from executor_svc.kv_cache import KVCache
from executor_svc.kv_pages import KvPages
from executor_svc.parallel.group import Group
from executor_svc.parallel.messages import Kind, decode_rows, decode_step, encode_rows, encode_step
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

    def __init__(self, group: Group, watch: Watch) -> None:
        self.group = group
        self.watch = watch

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
        self.watch.tell(kind, encode_rows(x))


class LeadingModel:
    """Rank 0's: to whoever runs it a model as any other. Called on one thread."""

    def __init__(self, model: RankModel, ranks: ConnectedRanks) -> None:
        self._model = model
        self._watch = ranks.watch

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, kv_cache: KVCache) -> Tensor:
        """See CausalLM."""
        self._watch.tell(Kind.STEP, encode_step(token_ids, metadata))
        with guarded(self._watch, 0):
            return self._model.forward(token_ids, metadata, kv_cache)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See CausalLM."""
        with guarded(self._watch, 0):
            return self._model.compute_logits(hidden)

    def likeliest(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """See CausalLM."""
        with guarded(self._watch, 0):
            return self._model.likeliest(hidden)


def follow(model: RankModel, kv_cache: KVCache, ranks: ConnectedRanks, pages: KvPages | None = None) -> None:
    """Do what rank 0 tells, until it ends in order. `pages`: is told of each step."""
    head = model.head
    assert isinstance(head, DividedVocabulary)  # the loader
    rank = ranks.share.rank
    with torch.inference_mode():
        while True:
            kind, message = ranks.watch.received.get()
            if kind is Kind.END:
                return
            with guarded(ranks.watch, rank):
                if kind is not Kind.STEP:
                    head.answer(kind, decode_rows(message))
                    continue
                token_ids, metadata = decode_step(message)
                if pages is not None:
                    pages.begin([int(metadata.slot_mapping.max()) // kv_cache.block_size])
                model.forward(token_ids, metadata, kv_cache)
                if pages is not None:
                    pages.end()
