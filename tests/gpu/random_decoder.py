"""A decoder of Llama's shape with random weights, made of a kernel set's ops alone: to check and measure with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from executor_svc.attention import AttentionMetadata
from executor_svc.kernels import KernelSet
from executor_svc.kernels.linear import Linear
from executor_svc.kernels.paged_attention import PagedAttention

BLOCK_SIZE = 16
EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    def weight_bytes(self, item_bytes: int) -> int:
        """Bytes that a step reads of the weights."""
        heads = 2 * self.heads + 2 * self.kv_heads
        layer = self.hidden * (heads * self.head_dim + 3 * self.intermediate)
        return (layer * self.layers + self.hidden * self.vocab) * item_bytes

    def kv_token_bytes(self, item_bytes: int) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_dim * item_bytes


SHAPES = (
    Shape("Llama-1B", 2048, 8192, 16, 32, 8, 64, 128_256),
    Shape("Llama-8B", 4096, 14_336, 32, 32, 8, 128, 128_256),
)
TINY = Shape("tiny", 48, 80, 2, 4, 2, 16, 320)


@dataclass(frozen=True)
class _Layer:
    input_norm: Tensor
    qkv: Linear
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    keys: Tensor
    values: Tensor


class RandomDecoder:
    """The model, and its KV memory of `num_blocks` blocks."""

    def __init__(
        self, shape: Shape, kernels: KernelSet, num_blocks: int, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> None:
        """The same seed gives the same weights on every device for small shapes, which are drawn on the CPU."""
        self.shape = shape
        self._kernels = kernels
        is_small = shape.hidden < 1024
        generator = torch.Generator("cpu" if is_small else device).manual_seed(seed)

        def weight(rows: int, columns: int) -> Tensor:
            drawn = torch.randn(rows, columns, generator=generator, device=generator.device) * columns**-0.5
            return drawn.to(device, dtype)

        def pack(rows: int, columns: int) -> Linear:
            return kernels.pack_linear(weight(rows, columns), None)

        def norm() -> Tensor:
            return 1 + weight(1, shape.hidden)[0]

        heads = shape.heads + 2 * shape.kv_heads
        cache = (num_blocks, BLOCK_SIZE, shape.kv_heads, shape.head_dim)
        self._layers = [
            _Layer(
                norm(),
                pack(heads * shape.head_dim, shape.hidden),
                pack(shape.hidden, shape.heads * shape.head_dim),
                norm(),
                pack(2 * shape.intermediate, shape.hidden),
                pack(shape.hidden, shape.intermediate),
                torch.zeros(cache, dtype=dtype, device=device),
                torch.zeros(cache, dtype=dtype, device=device),
            )
            for _ in range(shape.layers)
        ]
        self._embedding = pack(shape.vocab, shape.hidden)
        self._final_norm = norm()
        half = shape.head_dim // 2
        self._frequencies = (10_000.0 ** (-torch.arange(half, dtype=torch.float32) / half)).to(device)

    def plan(self, metadata: AttentionMetadata) -> PagedAttention:
        """Plan a step's attention."""
        return self._kernels.plan_attention(metadata, BLOCK_SIZE)

    def step(self, token_ids: Tensor, metadata: AttentionMetadata, attention: PagedAttention) -> Tensor:
        """Give the logits, float32 [R, vocab], of each row's last token."""
        kernels, shape = self._kernels, self.shape
        angles = metadata.positions[:, None].float() * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        residual = self._embedding.weight_rows(token_ids)
        x = kernels.rms_norm(residual, self._layers[0].input_norm, EPS)
        next_norms = [layer.input_norm for layer in self._layers[1:]] + [self._final_norm]
        for layer, next_norm in zip(self._layers, next_norms, strict=True):
            query = kernels.rotary_write_kv(layer.qkv(x), cos, sin, metadata.slot_mapping, layer.keys, layer.values)
            attended = attention(query, layer.keys, layer.values, shape.head_dim**-0.5)
            x = kernels.add_rms_norm(layer.output(attended.flatten(1)), residual, layer.post_norm, EPS)
            x = kernels.add_rms_norm(layer.down(kernels.silu_and_mul(layer.gate_up(x))), residual, next_norm, EPS)
        return self._embedding(x[metadata.query_start[1:].long() - 1]).float()


def batch(
    query_lens: list[int], context_lens: list[int], device: torch.device, tables: list[list[int]] | None = None
) -> AttentionMetadata:
    """A step's metadata; without `tables` rows own blocks of ascending ids from 1."""
    counts = [-(-context // BLOCK_SIZE) for context in context_lens]
    if tables is None:
        firsts = [1 + sum(counts[:row]) for row in range(len(counts))]
        tables = [list(range(first, first + count)) for first, count in zip(firsts, counts, strict=True)]
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    positions, slots = [], []
    for row, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        table[row, : counts[row]] = torch.tensor(tables[row][: counts[row]], dtype=torch.int32)
        position = torch.arange(context_len - query_len, context_len)
        positions.append(position)
        slots.append(table[row, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE)
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    return AttentionMetadata(
        positions=torch.cat(positions).to(device),
        slot_mapping=torch.cat(slots).to(device),
        query_start=starts.to(device, torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
        block_tables=table.to(device),
        query_lens=tuple(query_lens),
        context_lens_host=tuple(context_lens),
    )


def greedy(
    decoder: RandomDecoder, kernels: KernelSet, prompts: list[list[int]], num_tokens: int, device: torch.device
) -> list[list[int]]:
    """Prefill all prompts in one step, then decode all of them: the tokens of each, by the set's own sampling."""
    sequences = [list(prompt) for prompt in prompts]
    longest = max(map(len, prompts)) + num_tokens
    blocks = -(-longest // BLOCK_SIZE)
    tables = [list(range(1 + row * blocks, 1 + (row + 1) * blocks)) for row in range(len(prompts))]
    computed = [0] * len(prompts)
    zeros = torch.zeros(len(prompts), device=device)
    filters = {"top_p": zeros + 1, "min_p": zeros, "typical_p": zeros + 1, "uniform": zeros.double()}
    for _ in range(num_tokens):
        query_lens = [len(tokens) - done for tokens, done in zip(sequences, computed, strict=True)]
        metadata = batch(query_lens, [len(tokens) for tokens in sequences], device, tables)
        token_ids = [token for tokens, done in zip(sequences, computed, strict=True) for token in tokens[done:]]
        logits = decoder.step(torch.tensor(token_ids, device=device), metadata, decoder.plan(metadata))
        computed = [len(tokens) for tokens in sequences]
        drawn = kernels.sample_tokens(logits, temperature=zeros, top_k=zeros.long(), **filters)
        for tokens, token in zip(sequences, drawn.tolist(), strict=True):
            tokens.append(token)
    return [tokens[len(prompt) :] for tokens, prompt in zip(sequences, prompts, strict=True)]
