"""Pipelined runners over the fake device, and models of which both runners give the same tokens to the bit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from fake_device import FakeDevice
from fakes_executor import HIDDEN, RecallConfig
from torch import Tensor

from executor_svc.attention import AttentionMetadata
from executor_svc.batch import Limits, StepBatch, StepResult
from executor_svc.kernels import KernelSet, build_kernels
from executor_svc.kv_cache import KVCache
from executor_svc.model_runner import CausalLM, ModelRunner
from executor_svc.pipeline.flight import Flight
from executor_svc.pipeline.graphs import graph_sizes
from executor_svc.pipeline.runner import PipelinedRunner
from executor_svc.sampler import Sampler


class ExactModel:
    """A CausalLM whose hidden state is a fingerprint of all tokens before, each read back from its KV slot.

    All its numbers are small whole ones, so that sums are exact in any order: rows can be padded, batched and cut as
    one likes. Everything is worked out on tensors, so it runs on devices and can be captured. `nan_token` makes the
    hidden states from it on NaN; `before_forward` is called before each forward pass with its number, from 1.
    """

    config = RecallConfig()

    def __init__(
        self,
        vocab_size: int,
        *,
        nan_token: int | None = None,
        before_forward: Callable[[int], None] = lambda number: None,
    ) -> None:
        generator = torch.Generator().manual_seed(20)
        self._embedding = torch.randint(-4, 5, (vocab_size, HIDDEN), generator=generator).float()
        self._head = torch.randint(-4, 5, (HIDDEN, vocab_size), generator=generator).float()
        if nan_token is not None:
            self._embedding[nan_token] = float("nan")
        self._before_forward = before_forward
        self.num_forwards = 0

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, kv_cache: KVCache) -> Tensor:
        """See CausalLM."""
        self.num_forwards += 1
        self._before_forward(self.num_forwards)
        device, block_size = token_ids.device, kv_cache.block_size
        keys, values = kv_cache.keys[0].view(-1, HIDDEN), kv_cache.values[0].view(-1, HIDDEN)
        keys.index_copy_(0, metadata.slot_mapping, self._embedding.index_select(0, token_ids))
        values.index_copy_(0, metadata.slot_mapping, metadata.positions[:, None].float().expand(-1, HIDDEN))
        tokens = torch.arange(len(token_ids), device=device)
        rows = torch.searchsorted(metadata.query_start[1:].long(), tokens, right=True)
        places = torch.arange(metadata.block_tables.shape[1] * block_size, device=device)
        blocks = metadata.block_tables.index_select(0, rows).long()
        slots = blocks.index_select(1, places // block_size) * block_size + places % block_size
        unseen = (places > metadata.positions[:, None])[:, :, None]
        read = keys[slots].masked_fill(unseen, 0.0)
        behind = (metadata.positions[:, None, None] - values[slots]).masked_fill(unseen, 0.0)
        return (read * ((behind * 7 + 3) % 5 - 2)).sum(dim=1)

    def likeliest(self, hidden: Tensor) -> None:
        """None: the logits are to be seen."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See CausalLM."""
        return torch.matmul(hidden, self._head) / 64


def exact_on(device: FakeDevice, limits: Limits, **options: Any) -> ExactModel:
    """The model with its weights on the fake device."""
    with device.watch.unwatched():
        return ExactModel(limits.vocab_size, **options)


def poisoned_cache(model: Any, limits: Limits) -> KVCache:
    """KV memory that is NaN: reading what was never written shows."""
    cache = KVCache.allocate(model.config, limits.num_blocks, limits.block_size, torch.float32, torch.device("cpu"))
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(float("nan"))
    return cache


def make_plain(limits: Limits, model: CausalLM) -> ModelRunner:
    """The CPU's runner."""
    return ModelRunner(model, poisoned_cache(model, limits), Sampler(build_kernels("reference")), limits)


def make_pipelined(
    limits: Limits,
    model: CausalLM,
    device: FakeDevice,
    *,
    graphs: bool = True,
    kernels: KernelSet | None = None,
) -> PipelinedRunner:
    """A runner on the fake device, with graphs of every size that the server captures. Under device.watching().

    `kernels`: a watched set.
    """
    watched = kernels or device.watch.kernels(build_kernels("reference"))
    with device.on(device.compute):
        cache = poisoned_cache(model, limits)
    runner = PipelinedRunner(model, cache, watched, limits, device)
    if graphs:
        runner.capture_graphs(graph_sizes(limits.max_num_seqs))
    return runner


class Ahead:
    """Runs steps for a Driver as the worker does: each is launched as soon as the runner can, and landed when it must.

    What a driver gets for a step is its result to come, which lands when the driver looks at it.
    """

    def __init__(self, runner: PipelinedRunner) -> None:
        self._runner = runner
        self._air: deque[Coming] = deque()
        self.most = 0
        """In the air at a time."""

    def run(self, batch: StepBatch) -> Any:
        """Launch a step."""
        while not self._runner.can_launch():
            self.land()
        coming = Coming(self, self._runner.launch(batch))
        self._air.append(coming)
        self.most = max(self.most, len(self._air))
        return coming

    def land(self) -> None:
        """Land the oldest step."""
        coming = self._air.popleft()
        coming.flight.wait()
        coming.result = self._runner.land(coming.flight)
        self._runner.check_invariants()


class Coming:
    """A result that is looked at later."""

    def __init__(self, ahead: Ahead, flight: Any) -> None:
        self._ahead = ahead
        self.flight = flight
        self.result: StepResult | None = None

    def __getattr__(self, name: str) -> Any:
        while self.result is None:
            self._ahead.land()
        return getattr(self.result, name)


class Watched:
    """A pipelined runner on a thread of its own: each call is watched there, as modes of torch belong to a thread."""

    def __init__(self, device: FakeDevice, make: Callable[[], PipelinedRunner]) -> None:
        self._device = device
        with device.watching():
            self._runner = make()

    @property
    def limits(self) -> Limits:
        return self._runner.limits

    def reset(self) -> None:
        with self._device.watching():
            self._runner.reset()

    def check_invariants(self) -> None:
        self._runner.check_invariants()

    def can_launch(self) -> bool:
        return self._runner.can_launch()

    def launch(self, batch: StepBatch) -> Flight:
        with self._device.watching():
            return self._runner.launch(batch)

    def refuse(self, batch: StepBatch) -> Flight:
        with self._device.watching():
            return self._runner.refuse(batch)

    def land(self, flight: Flight) -> StepResult:
        with self._device.watching():
            return self._runner.land(flight)
