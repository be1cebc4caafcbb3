"""The models and steps of bench/fusion.py: random weights that are the same each time, made in memory."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from executor_svc.attention import AttentionMetadata
from executor_svc.graph.passes.base import Pass
from executor_svc.kernels import KernelSet
from executor_svc.kv_cache import KVCache
from executor_svc.models import CausalLM, ModelConfig
from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.loader import load_checkpoint
from executor_svc.models.registry import find_family
from executor_svc.weights import Region

CPU = torch.device("cpu")
CONTEXT = 512
BLOCK_SIZE = 16
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
}
"""GPT-2 (124M) and SmolLM2-135M, by their config.json."""


class FusionModel(Protocol):
    """A model as a step calls it."""

    config: ModelConfig

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, kv_cache: KVCache) -> Tensor:
        """See CausalLM."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See CausalLM."""


@dataclass(frozen=True)
class RandomCheckpoint:
    """A Checkpoint whose tensors follow from their names."""

    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    path: Path = Path("random")
    unreadable: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> RandomCheckpoint:
        """Return what a config asks for."""
        fields = ConfigFields(Path("random"), config)
        family = find_family(fields)
        return cls(config, family.name_tensors(family.read_config(fields), ()).tensors())

    def file_of(self, name: str) -> Path:  # noqa: ARG002 - all are of one
        """See Checkpoint."""
        return self.path

    def copy_to(self, name: str, out: Tensor, region: Region | None = None) -> None:
        """See Checkpoint."""
        if region is not None:
            whole = torch.empty(self.shapes[name])
            self.copy_to(name, whole)
            out.copy_(region.of(whole))
            return
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        scale = out.shape[-1] ** -0.5 if out.dim() == 2 else 0.02
        drawn = torch.empty(out.shape).normal_(std=scale, generator=generator)
        out.copy_(drawn + 1 if out.dim() == 1 and name.endswith("weight") else drawn)


def make_model(
    shape: str, kernels: KernelSet, passes: Sequence[Pass], shapes: Mapping[str, Mapping[str, Any]] | None = None
) -> CausalLM:
    """Load a model in bfloat16. `shapes`: in the place of SHAPES."""
    config = (shapes or SHAPES)[shape]
    return load_checkpoint(RandomCheckpoint.of(config), torch.bfloat16, CPU, kernels, passes=passes)


@dataclass(frozen=True)
class Step:
    """One step of a model, again and again."""

    model: FusionModel
    token_ids: Tensor
    metadata: AttentionMetadata
    kv_cache: KVCache
    last: Tensor

    @classmethod
    def decode(cls, model: FusionModel, rows: int, context: int = CONTEXT) -> Step:
        """Return a step of one token of each row, which has `context` tokens with it."""
        return cls._of(model, [1] * rows, context)

    @classmethod
    def chunk(cls, model: FusionModel, tokens: int) -> Step:
        """Return a step of one row's first tokens."""
        return cls._of(model, [tokens], tokens)

    @classmethod
    def _of(cls, model: FusionModel, lengths: list[int], context: int) -> Step:
        rows, blocks = len(lengths), -(-context // BLOCK_SIZE)
        tables = 1 + torch.arange(rows * blocks, dtype=torch.int32).view(rows, blocks)
        positions = torch.cat([torch.arange(context - length, context) for length in lengths])
        row_of = torch.repeat_interleave(torch.arange(rows), torch.tensor(lengths))
        slots = tables[row_of, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        cache = KVCache.allocate(model.config, 1 + rows * blocks, BLOCK_SIZE, torch.bfloat16, CPU)
        for tensor in (*cache.keys, *cache.values):
            tensor.normal_(std=0.5, generator=torch.Generator().manual_seed(1))
        metadata = AttentionMetadata(
            positions=positions,
            slot_mapping=slots,
            query_start=starts,
            context_lens=torch.full((rows,), context, dtype=torch.int32),
            block_tables=tables,
            query_lens=tuple(lengths),
            context_lens_host=(context,) * rows,
        )
        ids = torch.arange(len(positions)) * 37 % model.config.vocab_size
        return cls(model, ids, metadata, cache, starts[1:].long() - 1)

    def run(self) -> Tensor:
        """Run it, to the logits."""
        return self.model.compute_logits(self.layers()[self.last])

    def layers(self) -> Tensor:
        """Run it, to the last hidden states."""
        return self.model.forward(self.token_ids, self.metadata, self.kv_cache)
