"""How long steps take on a GPU, and how long they must: the floor is what its own copy and product rates give."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from time import perf_counter

import torch
from random_decoder import BLOCK_SIZE, SHAPES, RandomDecoder, Shape, batch
from torch import Tensor

from executor_svc.attention import AttentionMetadata
from executor_svc.kernels import KernelSet

REPEATS = 20
CALLS = 8
LAYERS = 32
"""Of a timed attention, which is cut once for all of them."""
CACHES_BYTES = 1 << 30
"""What they read in turn."""
DECODE_CONTEXT = 1024
DECODE_BATCHES = (1, 32, 256)
PREFILL_TOKENS = (512, 4096)


@dataclass(frozen=True)
class Rates:
    """What the card does at best."""

    bytes_per_second: float
    """Read and written by a copy."""
    operations_per_second: float
    """Of a bfloat16 product, two for each multiply-add."""


def seconds_of(call: Callable[[], object]) -> float:
    """The median time of a call on the device, by events, after it has run warm."""
    for _ in range(3):
        call()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)


def host_seconds_of(call: Callable[[], object]) -> float:
    """The median time from a call's begin to its end on the device, seen from the host, one after the other."""
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        started = perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(perf_counter() - started)
    return statistics.median(times)


def captured(call: Callable[[], object], times: int = 1) -> Callable[[], object]:
    """Make a graph of so many calls: what it takes is the device's time, and not the host's to launch it."""
    side = torch.cuda.Stream()
    # What the call takes was made on another stream.
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # What is garbage may not be given back in the middle of the capture.
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph, stream=side):
            for _ in range(times):
                call()
    finally:
        gc.enable()
    return graph.replay


def measure_rates(device: torch.device) -> Rates:
    """Copy 1 GiB, and multiply two matrices of 8192 x 8192, several times in a launch."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = seconds_of(captured(lambda: target.copy_(source), CALLS)) / CALLS
    a, b = (torch.randn(8192, 8192, device=device).bfloat16() for _ in range(2))
    multiplied = seconds_of(captured(lambda: a @ b, CALLS)) / CALLS
    return Rates(2 * source.numel() / copied, 2 * 8192**3 / multiplied)


@dataclass(frozen=True)
class StepTime:
    """One kind of step."""

    model: str
    kind: str
    """decode or prefill."""
    rows: int
    tokens: int
    graph: bool
    device_seconds: float
    host_seconds: float
    floor_seconds: float
    """The greater of bytes over bandwidth and operations over peak."""

    @property
    def over_floor(self) -> float:
        """How many times the floor."""
        return self.device_seconds / self.floor_seconds


@dataclass(frozen=True)
class AttentionTime:
    """Decode attention of one layer by itself."""

    rows: int
    context: int
    device_seconds: float
    share_of_copy: float
    """Of the bandwidth that a copy has."""


def attention_times(kernels: KernelSet, rates: Rates, device: torch.device) -> Iterator[AttentionTime]:
    """Decode attention of Llama-8B's heads, in bfloat16, as it stands in a graph: cut once for all layers, by what the
    device alone knows. The layers read so many keys and values in turn that none of it is left in a cache.
    """
    for rows, context in ((1, 32_768), (8, 8192), (64, 2048), (256, 1024)):
        metadata = replace(batch([1] * rows, [context] * rows, device), context_lens_host=None)
        shape = (int(metadata.block_tables.max()) + 1, BLOCK_SIZE, 8, 128)
        read = 2 * rows * context * 8 * 128 * 2
        num_caches = max(2, -(-CACHES_BYTES // read))
        caches = [[torch.randn(shape, device=device).bfloat16() for _ in range(2)] for _ in range(num_caches)]
        query = torch.randn(rows, 32, 128, device=device).bfloat16()
        seconds = seconds_of(captured(partial(_attend_all, kernels, metadata, query, caches))) / LAYERS
        yield AttentionTime(rows, context, seconds, read / seconds / rates.bytes_per_second)


def _attend_all(kernels: KernelSet, metadata: AttentionMetadata, query: Tensor, caches: list[list[Tensor]]) -> None:
    attention = kernels.plan_attention(metadata, BLOCK_SIZE)
    for layer in range(LAYERS):
        attention(query, *caches[layer % len(caches)], 128**-0.5)


def step_times(kernels: KernelSet, rates: Rates, device: torch.device, free_bytes: int) -> Iterator[StepTime]:
    """Decode and prefill of the shapes that fit, each launched kernel by kernel and as one graph."""
    for shape in SHAPES:
        blocks = 2 + max(DECODE_BATCHES) * (DECODE_CONTEXT // BLOCK_SIZE)
        kv_bytes = blocks * BLOCK_SIZE * shape.kv_token_bytes(torch.bfloat16.itemsize)
        if kv_bytes + shape.weight_bytes(torch.bfloat16.itemsize) > 0.8 * free_bytes:
            continue
        decoder = RandomDecoder(shape, kernels, blocks, torch.bfloat16, device)
        for rows in DECODE_BATCHES:
            yield from _one_kind(decoder, rates, "decode", [1] * rows, [DECODE_CONTEXT] * rows, device)
        for tokens in PREFILL_TOKENS:
            yield from _one_kind(decoder, rates, "prefill", [tokens], [tokens], device)
        del decoder
        torch.cuda.empty_cache()


def _one_kind(
    decoder: RandomDecoder, rates: Rates, kind: str, queries: list[int], contexts: list[int], device: torch.device
) -> Iterator[StepTime]:
    metadata = batch(queries, contexts, device)
    token_ids = torch.randint(0, decoder.shape.vocab, (sum(queries),), device=device)
    attention = decoder.plan(metadata)
    floor = floor_seconds(decoder.shape, torch.bfloat16.itemsize, rates, queries, contexts)

    def step() -> object:
        return decoder.step(token_ids, metadata, attention)

    for graph in (False, True):
        call = captured(step) if graph else step
        # The plan's tables were put on the device by the first call.
        device_seconds, host_seconds = seconds_of(call), host_seconds_of(call)
        yield StepTime(decoder.shape.name, kind, len(queries), sum(queries), graph, device_seconds, host_seconds, floor)


def floor_seconds(shape: Shape, item_bytes: int, rates: Rates, queries: list[int], contexts: list[int]) -> float:
    """The least time of a step, all that it reads and multiplies counted once."""
    moved = shape.weight_bytes(item_bytes) + sum(contexts) * shape.kv_token_bytes(item_bytes)
    heads = 2 * shape.heads + 2 * shape.kv_heads
    layer = shape.hidden * (heads * shape.head_dim + 3 * shape.intermediate)
    operations = 2 * (sum(queries) * layer * shape.layers + len(queries) * shape.hidden * shape.vocab)
    for query, context in zip(queries, contexts, strict=True):
        seen = query * context - query * (query - 1) // 2
        operations += 4 * seen * shape.heads * shape.head_dim * shape.layers
    return max(moved / rates.bytes_per_second, operations / rates.operations_per_second)


def as_rows(times: list[StepTime]) -> list[dict[str, object]]:
    """For JSON."""
    return [asdict(each) | {"over_floor": each.over_floor} for each in times]
