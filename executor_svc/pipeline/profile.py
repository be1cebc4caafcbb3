"""How much of a device's memory is left for KV blocks: the largest step is run, and what it takes is measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from executor_svc.batch import Limits, NewSequence, SamplingParams, StepBatch, StepFailureReason, StoppingParams
from executor_svc.device import Device
from executor_svc.kernels import KernelSet
from executor_svc.kv_cache import KVCache, KVShape
from executor_svc.model_runner import CausalLM
from executor_svc.pipeline.graphs import graph_sizes
from executor_svc.pipeline.runner import PipelinedRunner
from octavo.rpc.settings import SettingsError

GRAPH_BYTES = 8 << 20
"""What a graph's launches take beside tensors, about."""
CHUNK = 64
"""Tokens of a row whose lines fill attention's taller tiles."""
MAX_TOP = 20
"""Top logprobs that a row may want, see record_check."""


@dataclass(frozen=True)
class Profile:
    """Bytes of a device's memory, by what takes them."""

    device: str
    total: int
    others: int
    """Other processes, and what driver and libraries need."""
    held: int
    """Weights, and tables of fixed size."""
    step: int
    """The largest step."""
    graphs: int

    def kv_memory(self, share: float) -> int:
        """Give what is left for KV blocks where so large a share of the memory may be used. Not below 0."""
        return max(0, int(self.total * share) - self.others - self.held - self.step - self.graphs)

    def account(self, share: float) -> str:
        """Say where the memory goes."""
        parts = (
            f"other processes and the driver {size(self.others)}, weights and tables {size(self.held)}, the largest "
            f"step {size(self.step)}, graphs {size(self.graphs)}"
        )
        usable = int(self.total * share)
        return f"{size(usable)} of the {size(self.total)} of {self.device} may be used: {parts}"


def size(num_bytes: int) -> str:
    """Write a number of bytes for people."""
    return f"{num_bytes / (1 << 30):.2f} GiB" if num_bytes >= 1 << 27 else f"{num_bytes / (1 << 20):.2f} MiB"


def measure(
    model: CausalLM,
    shape: KVShape,
    kernels: KernelSet,
    limits: Limits,
    dtype: torch.dtype,
    device: Device,
    *,
    has_graphs: bool,
) -> Profile:
    """Run the largest step there can be, over KV memory of one block that all its rows share, and whatever else brings
    kernels to be compiled that a step may launch: none is while requests wait.

    The weights are loaded. Raises SettingsError where the step does not fit, and RuntimeError where it fails otherwise.
    """
    limits = replace(limits, num_blocks=2)
    kv_cache = kv_of_measuring(shape, limits.block_size, dtype, device)
    runner = PipelinedRunner(model, kv_cache, kernels, limits, device)
    step = max(_peak(runner, batch, limits, device) for batch in (largest_step(limits), *long_rows(limits)))
    graphs = 0
    if has_graphs:
        graphs = graph_memory(limits, _peak(runner, decode_step(limits), limits, device))
    runner.reset()
    device.give_back()
    memory = device.memory()
    return Profile(device.name, memory.total, memory.others, memory.in_use, step, graphs)


def kv_of_measuring(shape: KVShape, block_size: int, dtype: torch.dtype, device: Device) -> KVCache:
    """Return KV memory of one block, and the null block, in which every row of a step may write."""
    with device.on(device.compute):
        kv_cache = KVCache.allocate(shape, 2, block_size, dtype, device.torch_device)
        for tensor in (*kv_cache.keys, *kv_cache.values):
            tensor.zero_()
    return kv_cache


def graph_memory(limits: Limits, peak: int) -> int:
    """Return what all graphs take; `peak`: what the largest of their steps does."""
    sizes = graph_sizes(limits.max_num_seqs)
    # Every size keeps its logits.
    logits = (sum(sizes) - limits.max_num_seqs) * limits.vocab_size * 4
    return peak + 2 * len(sizes) * GRAPH_BYTES + logits


def _peak(runner: PipelinedRunner, batch: StepBatch, limits: Limits, device: Device) -> int:
    """Return what a step takes at most, beside what was there: its tensors, and what the allocator could not use of the
    memory that it took for them.
    """
    runner.reset()
    device.synchronize()
    device.give_back()
    before = device.memory()
    device.reset_peak()
    failure = runner.run(batch).failure
    if failure is None:
        after = device.memory()
        return max(after.peak - before.in_use, after.held - before.held)
    if failure.reason is not StepFailureReason.OUT_OF_MEMORY:
        raise RuntimeError(f"the largest step failed: {failure.message}")
    left = before.total - before.in_use - before.others
    raise SettingsError(
        f"--max-num-batched-tokens {limits.max_num_batched_tokens}, --max-num-seqs {limits.max_num_seqs}: the largest "
        f"step does not fit into the memory of {device.name}: of {size(before.total)}, weights and tables take "
        f"{size(before.in_use)} and others {size(before.others)}, which leaves {size(left)}; "
        f"lower one of them, or --max-model-len"
    )


def largest_step(limits: Limits) -> StepBatch:
    """Return a step of as many rows and tokens as may be, all rows sampling with everything that takes memory.

    The first row is the end of a sequence as long as may be; the others are one token each. All are in block 1.
    """
    rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    longest, budget = limits.max_model_len - 1, limits.max_num_batched_tokens - (rows - 1)
    cached = -(-max(0, longest - budget) // limits.block_size) * limits.block_size
    lengths = [longest] + [1] * (rows - 1)
    sampling = SamplingParams(
        temperature=1.0,
        top_p=0.9,
        top_k=50,
        min_p=0.01,
        typical_p=0.9,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        top_logprobs=min(MAX_TOP, limits.vocab_size),
        bias_token_ids=(0,),
        bias_values=(1.0,),
        bad_words=((0,),),
    )
    sequences = [
        NewSequence(handle, (0,) * length, length, 0, sampling, StoppingParams(max_tokens=1), computed)
        for handle, length, computed in zip(range(1, rows + 1), lengths, [cached] + [0] * (rows - 1), strict=True)
    ]
    return _step(limits, sequences)


def long_rows(limits: Limits) -> list[StepBatch]:
    """Return steps of one row at the end of a sequence as long as may be, one of a token and one of some: attention
    shares its keys out among the whole device, and merges the parts.
    """
    size, longest = limits.block_size, limits.max_model_len - 1
    draw, stopping = SamplingParams(temperature=1.0), StoppingParams(max_tokens=1)
    steps = []
    for tokens in (1, CHUNK):
        cached = (longest - tokens) // size * size
        if cached > 0 and tokens <= limits.max_num_batched_tokens:
            length = cached + tokens
            steps.append(_step(limits, [NewSequence(1, (0,) * length, length, 0, draw, stopping, cached)]))
    return steps


def decode_step(limits: Limits) -> StepBatch:
    """Return a step of as many rows as may be, one token each, as graphs are captured of."""
    rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    draw, stopping = SamplingParams(temperature=1.0), StoppingParams(max_tokens=1)
    return _step(limits, [NewSequence(handle, (0,), 1, 0, draw, stopping) for handle in range(1, rows + 1)])


def _step(limits: Limits, sequences: list[NewSequence]) -> StepBatch:
    blocks = [-(-len(each.token_ids) // limits.block_size) for each in sequences]
    return StepBatch(
        0,
        1,
        new_sequences=tuple(sequences),
        handles=tuple(each.handle for each in sequences),
        num_scheduled_tokens=tuple(len(each.token_ids) - each.num_cached_tokens for each in sequences),
        num_computed_tokens=tuple(each.num_cached_tokens for each in sequences),
        num_new_blocks=tuple(blocks),
        new_blocks=(1,) * sum(blocks),
    )
