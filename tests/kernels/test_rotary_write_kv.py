"""Rotary embedding and KV write in one op: the reference against transformers, every set against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from instruction_sets import each_instruction_set
from torch import Tensor
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from executor_svc.kernels import KERNEL_SETS, KernelSet, build_kernels
from executor_svc.kernels.native.isa import InstructionSet
from executor_svc.kernels.native.library import load_library
from executor_svc.kernels.rotary_write_kv import RotaryWriteKv
from executor_svc.kernels.rotary_write_kv.cpu import make_rotary_write_kv
from executor_svc.kernels.rotary_write_kv.reference import rotary_embedding, rotary_write_kv

TOLERANCES = {torch.float32: {"rtol": 1e-6, "atol": 1e-6}, torch.bfloat16: {"rtol": 8e-3, "atol": 1e-6}}

each_set = pytest.mark.parametrize("kernels", [build_kernels(name) for name in KERNEL_SETS], ids=KERNEL_SETS)
each_dtype = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=["float32", "bfloat16"])


class Problem:
    """A step's merged projection, and caches full of NaN."""

    def __init__(
        self,
        num_tokens: int,
        *,
        heads: tuple[int, int] = (9, 3),
        head_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        rotary_dim: int | None = None,
    ) -> None:
        """`rotary_dim` elements of a head turn, by default as many as make pairs."""
        generator = torch.Generator().manual_seed(0)
        num_heads, num_kv_heads = heads
        self.qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator).to(dtype)
        half = (head_dim if rotary_dim is None else rotary_dim) // 2
        angles = 10 * torch.randn(num_tokens, half, generator=generator)
        self.cos, self.sin = angles.cos(), angles.sin()
        num_blocks = 2 + 2 * num_tokens // block_size
        self.shape = (num_blocks, block_size, num_kv_heads, head_dim)
        self.dtype = dtype
        free = torch.randperm((num_blocks - 1) * block_size, generator=generator) + block_size
        self.slots = free[:num_tokens]

    def run(self, op: RotaryWriteKv) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries and both caches."""
        caches = [torch.full(self.shape, torch.nan, dtype=self.dtype) for _ in range(2)]
        before = self.qkv.clone()
        query = op(self.qkv, self.cos, self.sin, self.slots, *caches)
        assert torch.equal(self.qkv, before)
        assert query.is_contiguous()
        return query, caches[0], caches[1]

    def check(self, op: RotaryWriteKv) -> None:
        """Hold an op to the reference: NaN where that has NaN, so that other slots are as they were."""
        for actual, expected in zip(self.run(op), self.run(rotary_write_kv), strict=True):
            assert actual.dtype == self.dtype
            torch.testing.assert_close(actual, expected, equal_nan=True, **TOLERANCES[self.dtype])


@pytest.mark.parametrize("head_dim", [2, 10, 64, 128])
def test_the_reference_turns_heads_as_transformers_does(head_dim: int) -> None:
    """Heads are turned as transformers turns them."""
    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), (torch.arange(33) * 7)[None])
    x = torch.randn(33, 5, head_dim, generator=torch.Generator().manual_seed(0))
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    half = head_dim // 2
    turned = rotary_embedding(x, cos[0, :, :half], sin[0, :, :half])
    torch.testing.assert_close(turned, expected[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


@each_set
@each_dtype
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("num_tokens", [1, 2, 15, 17, 64])
def test_slots(kernels: KernelSet, dtype: torch.dtype, block_size: int, num_tokens: int) -> None:
    """Exactly the named slots change: values bit for bit to what was given, keys to the turned ones."""
    problem = Problem(num_tokens, heads=(4, 2), head_dim=10, block_size=block_size, dtype=dtype)
    _, keys, values = problem.run(kernels.rotary_write_kv)
    heads = problem.qkv.view(num_tokens, 8, 10)
    turned = rotary_embedding(heads[:, 4:6].float(), problem.cos, problem.sin)
    torch.testing.assert_close(keys.flatten(0, 1)[problem.slots].float(), turned, **TOLERANCES[dtype])
    assert torch.equal(values.flatten(0, 1)[problem.slots], heads[:, 6:])
    untouched = torch.ones(len(values.flatten(0, 1)), dtype=torch.bool).index_fill_(0, problem.slots, False)
    assert keys.flatten(0, 1)[untouched].isnan().all()
    assert values.flatten(0, 1)[untouched].isnan().all()


@each_instruction_set
@each_dtype
@pytest.mark.parametrize("head_dim", [2, 10, 30, 64, 66, 128])
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (8, 1), (4, 4)])
def test_every_instruction_set(isa: InstructionSet, dtype: torch.dtype, head_dim: int, heads: tuple[int, int]) -> None:
    """Each set's kernel gives what the reference gives, for few tokens and for so many that threads share them."""
    op = make_rotary_write_kv(load_library(2, isa))
    for num_tokens in (1, 3, 200):
        Problem(num_tokens, heads=heads, head_dim=head_dim, dtype=dtype).check(op)


@each_instruction_set
@each_dtype
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"),
    [(64, 0), (64, 2), (64, 16), (64, 32), (64, 62), (33, 0), (33, 18), (33, 32), (80, 20), (128, 96), (7, 6), (1, 0)],
)
def test_part_of_a_head_turns(isa: InstructionSet, dtype: torch.dtype, head_dim: int, rotary_dim: int) -> None:
    """The first rotary_dim elements of a query or key head turn as a head of that width would; the others, however odd
    their number, keep their bits, all of them where rotary_dim is 0.
    """
    op = make_rotary_write_kv(load_library(2, isa))
    for num_tokens in (1, 200):
        problem = Problem(num_tokens, heads=(4, 2), head_dim=head_dim, dtype=dtype, rotary_dim=rotary_dim)
        problem.check(op)
        query, keys, _ = problem.run(op)
        heads = problem.qkv.view(num_tokens, 8, head_dim)
        turned = rotary_embedding(heads[..., :rotary_dim], problem.cos, problem.sin)
        written = keys.flatten(0, 1)[problem.slots]
        for part, start in ((query, 0), (written, 4)):
            own = slice(start, start + part.shape[1])
            assert torch.equal(part[..., rotary_dim:], heads[:, own, rotary_dim:])
            torch.testing.assert_close(part[..., :rotary_dim], turned[:, own], **TOLERANCES[dtype])


@each_instruction_set
@each_dtype
def test_a_token_has_the_same_bits_alone(isa: InstructionSet, dtype: torch.dtype) -> None:
    """The tokens beside it and the number of threads change no bit of a token's queries, keys and values."""
    problem = Problem(150, dtype=dtype)
    query, keys, values = problem.run(make_rotary_write_kv(load_library(3, isa)))
    alone = make_rotary_write_kv(load_library(1, isa))
    for token in (0, 7, 149):
        caches = [torch.full(problem.shape, torch.nan, dtype=dtype) for _ in range(2)]
        at = slice(token, token + 1)
        own = alone(problem.qkv[at], problem.cos[at], problem.sin[at], problem.slots[at], *caches)
        assert torch.equal(own, query[at])
        slot = problem.slots[at]
        for mine, theirs in zip(caches, (keys, values), strict=True):
            assert torch.equal(mine.flatten(0, 1)[slot], theirs.flatten(0, 1)[slot])
    load_library(None, isa)


@each_set
def test_padding_is_written_to_the_null_block_only(kernels: KernelSet) -> None:
    """Tokens whose slots all lie in block 0, even the same one, change nothing outside it."""
    caches: Any = [torch.zeros(4, 16, 2, 8) for _ in range(2)]
    angles = torch.zeros(5, 4)
    padding = torch.full((5, 6 * 8), torch.nan)
    kernels.rotary_write_kv(padding, angles.cos(), angles.sin(), torch.tensor([0, 0, 3, 0, 15]), *caches)
    for cache in caches:
        assert torch.equal(cache[1:], torch.zeros(3, 16, 2, 8))


@each_set
def test_nan_stays_with_its_token(kernels: KernelSet) -> None:
    """A NaN in one element of a head comes out in the pair that it belongs to, and nowhere else."""
    problem = Problem(20, heads=(4, 2), head_dim=16)
    sound = problem.run(kernels.rotary_write_kv)[0]
    problem.qkv[7, 2 * 16 + 11] = torch.nan
    caches = [torch.zeros(problem.shape) for _ in range(2)]
    query = kernels.rotary_write_kv(problem.qkv, problem.cos, problem.sin, problem.slots, *caches)
    spoilt = torch.zeros(query.shape, dtype=torch.bool)
    spoilt[7, 2, 3] = spoilt[7, 2, 11] = True
    assert torch.equal(query.isnan(), spoilt)
    assert torch.equal(query[~spoilt], sound[~spoilt])
