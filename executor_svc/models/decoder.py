"""The decoder: embedding, layers, final norm, head. Inference only; the caller enters torch.inference_mode.

What lies between the embedding and the final norm is a graph, captured plain and fused by passes: executor_svc/graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from executor_svc.attention import AttentionMetadata
from executor_svc.graph.compiled import CompiledGraph
from executor_svc.kernels import KernelSet
from executor_svc.kernels.linear import Linear
from executor_svc.kernels.paged_attention import PagedAttention
from executor_svc.kernels.record import StepBody
from executor_svc.kv_cache import KVCache
from executor_svc.layers.rotary import RotaryAngles
from executor_svc.models.config import ModelConfig


@dataclass(frozen=True)
class Ends:
    """What stands before the first layer and after the last one."""

    embedding: Linear
    head: Linear
    positions: Tensor | None = None
    """[positions, hidden]."""
    project_in: Linear | None = None
    project_out: Linear | None = None


@dataclass(frozen=True)
class StepPlan:
    """What a step's forward pass takes beside its tokens."""

    angles: tuple[Tensor, ...]
    """Cosines and sines of each kind of rotary, see capture_decoder."""
    attention: PagedAttention


class CausalLM:
    """A loaded model."""

    code = "octavo"
    """Whose code it is. Its bits depend on the batch only where those of its kernels do."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: KernelSet,
        *,
        ends: Ends,
        layers: CompiledGraph,
        dtype: torch.dtype,
        device: torch.device,
        longest: int,
    ) -> None:
        """`layers`: the compiled graph of `capture_decoder`. `longest`: tokens that a sequence may get."""
        self.config = config
        self.dtype = dtype
        """Of weights and hidden states."""
        self.layers = layers
        """What runs between the embedding and the final norm, that included."""
        self._plan_attention = kernels.plan_attention
        self._record = kernels.record
        self._kv_cache: KVCache | None = None
        self._body: StepBody
        self._ends = ends
        self._angles = [RotaryAngles(rotary, device, longest) for rotary in config.rotaries]
        self._has_still_layers = any(layer.rotary is None for layer in config.layers)
        # As the models' own code has it, in the weights' dtype.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=dtype))

    @property
    def head(self) -> Linear:
        """What gives the logits, before they are scaled."""
        return self._ends.head

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, kv_cache: KVCache) -> Tensor:
        """Give the last hidden states, after the final norm: [T, hidden] of the model's dtype, until the next call.

        token_ids is int64 [T], T at least 1, each below vocab_size. Writes keys and values of the T tokens to kv_cache.
        """
        return self.forward_planned(token_ids, metadata, kv_cache, self.plan(metadata, kv_cache.block_size))

    def forward_planned(
        self, token_ids: Tensor, metadata: AttentionMetadata, kv_cache: KVCache, plan: StepPlan
    ) -> Tensor:
        """Do as `forward`, by a plan of the same metadata."""
        if kv_cache is not self._kv_cache:
            self._kv_cache = kv_cache
            self._body = self._record(partial(self._run, kv_cache))
        hidden = self._embed(token_ids, metadata.positions)
        return self._body([hidden, metadata.slot_mapping, *plan.angles], plan.attention)

    def plan(self, metadata: AttentionMetadata, block_size: int) -> StepPlan:
        """Work out what a forward pass needs beside its tokens. Any thread may."""
        positions = metadata.positions
        angles = [angle for rotary in self._angles for angle in rotary(positions)]
        if self._has_still_layers:
            none = torch.empty((len(positions), 0), device=positions.device)
            angles.extend((none, none))
        return StepPlan(tuple(angles), self._plan_attention(metadata, block_size))

    def _run(self, kv_cache: KVCache, inputs: Sequence[Tensor], attention: PagedAttention) -> Tensor:
        """All that lies between a step's inputs and its last hidden states, see StepBody and capture_decoder."""
        hidden: Tensor = self.layers(*inputs, attention, *kv_cache.keys, *kv_cache.values)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Give the logits, a new float32 [N, vocab_size], of hidden [N, hidden] as forward gave them."""
        config, ends = self.config, self._ends
        if not len(hidden):
            return hidden.new_empty((0, config.vocab_size)).float()
        if ends.project_out is not None:
            hidden = ends.project_out(hidden)
        logits = ends.head.logits(hidden)
        if config.logit_scale != 1.0:
            logits *= config.logit_scale
        if config.logit_soft_cap:
            logits.div_(config.logit_soft_cap).tanh_().mul_(config.logit_soft_cap)
        return logits

    def likeliest(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """Give the token of the highest logit of each row, among equals the first, int64 [N], and whether all of the
        row's logits are finite, bool [N]. None where logits have to be written, as they are not what the head gives or
        as its kernel does not look at them.
        """
        config, ends = self.config, self._ends
        if config.logit_scale != 1.0 or config.logit_soft_cap:
            return None
        if ends.project_out is not None:
            hidden = ends.project_out(hidden)
        return ends.head.likeliest(hidden)

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        ends = self._ends
        x = ends.embedding.weight_rows(token_ids)
        if self._embedding_scale != 1.0:
            x *= self._embedding_scale
        if ends.project_in is not None:
            x = ends.project_in(x)
        if ends.positions is not None:
            x += ends.positions[positions]
        return x
