"""Recorded bodies: the same bits as without, whatever changes between steps, and no recording of what cannot be."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from attention_problem import Problem
from paged import ragged_metadata
from torch import Tensor

from executor_svc.kernels import KernelSet, build_kernels
from executor_svc.kernels.native.library import load_library
from executor_svc.kernels.native.program import Arena, NotRecordableError, Program, record_program
from executor_svc.kernels.paged_attention import PagedAttention
from executor_svc.kernels.record import StepBody
from executor_svc.kernels.record.cpu import MAX_TOKENS, RecordedBody

HEADS, HEAD_DIM, HIDDEN = (6, 2), 16, 96
EPS = 1e-5


class Model:
    """Some layers of random weights over KV memory of their own."""

    def __init__(self, kernels: KernelSet, num_layers: int, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        num_heads, num_kv_heads = HEADS
        width = (num_heads + 2 * num_kv_heads) * HEAD_DIM

        def linear(out: int, inside: int) -> tuple[Tensor, None]:
            return (torch.randn(out, inside) / inside**0.5).to(dtype), None

        self.kernels = kernels
        self.embedding = kernels.pack_linear(*linear(50, HIDDEN))
        self.norm = torch.rand(HIDDEN).to(dtype)
        self.layers = [
            [
                kernels.pack_linear(*linear(out, inside))
                for out, inside in ((width, HIDDEN), (HIDDEN, HIDDEN), (2 * 80, HIDDEN), (HIDDEN, 80))
            ]
            for _ in range(num_layers)
        ]
        shape = (40, 16, num_kv_heads, HEAD_DIM)
        self.caches = [[torch.zeros(shape, dtype=dtype) for _ in range(2)] for _ in range(num_layers)]

    def body(self, inputs: Sequence[Tensor], attention: PagedAttention) -> Tensor:
        """One step."""
        kernels = self.kernels
        token_ids, cos, sin, slots = inputs
        residual = self.embedding.weight_rows(token_ids)
        x = kernels.rms_norm(residual, self.norm, EPS)
        for (qkv, output, gate_up, down), caches in zip(self.layers, self.caches, strict=True):
            query = kernels.rotary_write_kv(qkv(x), cos, sin, slots, *caches)
            attended = output(attention(query, *caches, HEAD_DIM**-0.5).flatten(1))
            x = kernels.add_rms_norm(attended, residual, self.norm, EPS)
            x = kernels.add_rms_norm(down(kernels.silu_and_mul(gate_up(x))), residual, self.norm, EPS)
        return x

    def step(self, body: StepBody, tokens: Sequence[int], computed: Sequence[int]) -> Tensor:
        """Run one token of each row, which has some computed before, and return a copy of the result."""
        rows = [([1 + 3 * row, 2 + 3 * row, 3 + 3 * row], before, 1) for row, before in enumerate(computed)]
        metadata = ragged_metadata(rows, 16)
        angles = metadata.positions[:, None] * torch.rand(HEAD_DIM // 2, generator=torch.Generator().manual_seed(1))
        inputs = torch.tensor(tokens), angles.cos(), angles.sin(), metadata.slot_mapping
        return body(inputs, self.kernels.plan_attention(metadata, 16)).clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_steps_have_the_bits_of_the_body(compiled: KernelSet, dtype: torch.dtype) -> None:
    """Tokens, lengths and places change; recorded at the first step of a shape, every step gives the same bits."""
    recorded, plain = Model(compiled, 3, dtype), Model(compiled, 3, dtype)
    body = compiled.record(recorded.body)
    generator = torch.Generator().manual_seed(2)
    for step in range(24):
        tokens = torch.randint(0, 50, (1 + step % 3,), generator=generator).tolist()
        computed = [step] * len(tokens)
        assert torch.equal(recorded.step(body, tokens, computed), plain.step(plain.body, tokens, computed))
    for mine, theirs in zip(recorded.caches, plain.caches, strict=True):
        assert all(map(torch.equal, mine, theirs))
    assert isinstance(body, RecordedBody)
    assert body.num_programs == 3


def _record(model: Model, arena: Arena, body: StepBody, num_tokens: int = 2) -> Program:
    metadata = ragged_metadata([([1 + row], 3, 1) for row in range(num_tokens)], 16)
    half = torch.zeros(num_tokens, HEAD_DIM // 2)
    inputs = torch.zeros(num_tokens, dtype=torch.int64), half, half.clone(), metadata.slot_mapping
    plan = model.kernels.plan_attention(metadata, 16)
    return record_program(load_library(), arena, body, inputs, plan)  # type: ignore[arg-type]


@pytest.fixture
def kernels() -> KernelSet:
    """This machine's set."""
    return build_kernels("cpu")


def test_recording_computes_nothing(kernels: KernelSet) -> None:
    """KV memory is as it was: what is recorded has not run."""
    model = Model(kernels, 2)
    _record(model, Arena(), model.body)
    assert not any(cache.any() for caches in model.caches for cache in caches)


def test_layers_share_memory(kernels: KernelSet) -> None:
    """The arena of 12 layers is no larger than that of 2, and programs of one body share it."""
    small, large = Arena(), Arena()
    shallow, deep = Model(kernels, 2), Model(kernels, 12)
    _record(shallow, small, shallow.body)
    _record(deep, large, deep.body)
    assert len(small.memory) == len(large.memory) > 0
    _record(deep, large, deep.body, num_tokens=1)
    assert len(large.memory) == len(small.memory)


def test_a_program_follows_the_arena(kernels: KernelSet) -> None:
    """A larger program moves the arena; an earlier one finds its buffers there."""
    recorded, plain = Model(kernels, 2), Model(kernels, 2)
    body = kernels.record(recorded.body)
    for step, rows in enumerate([1, 1, 1, 8, 8, 1, 8, 1]):
        tokens, computed = list(range(rows)), [step] * rows
        assert torch.equal(recorded.step(body, tokens, computed), plain.step(plain.body, tokens, computed))


@pytest.mark.parametrize("compute", [lambda x: x + 1, lambda x: x.mul_(2), lambda x: x.t().contiguous().t()])
def test_what_torch_computes_is_not_recorded(kernels: KernelSet, compute: object) -> None:
    """Copies, sums and changes in place by torch would be missing from the program: such a body runs as it is."""
    recorded, plain = Model(kernels, 1), Model(kernels, 1)

    def with_torch(model: Model) -> StepBody:
        return lambda inputs, attention: compute(model.body(inputs, attention))  # type: ignore[operator]

    with pytest.raises(NotRecordableError, match="of torch computes something"):
        _record(recorded, Arena(), with_torch(recorded))
    body = kernels.record(with_torch(recorded))
    for step in range(4):
        assert torch.equal(
            recorded.step(body, [3, 4], [step, step]), plain.step(with_torch(plain), [3, 4], [step, step])
        )


def test_an_op_without_words_is_not_recorded(kernels: KernelSet) -> None:
    """An op that cannot be part of a program is named."""
    model = Model(kernels, 1)

    def body(inputs: Sequence[Tensor], attention: PagedAttention) -> Tensor:
        x = model.body(inputs, attention)
        kernels.finite_rows(x)
        return x

    with pytest.raises(NotRecordableError, match="octavo_finite_rows cannot be part of a program"):
        _record(model, Arena(), body)


def test_long_steps_run_as_they_are(kernels: KernelSet) -> None:
    """Beyond MAX_TOKENS nothing is recorded, and the result is the body's."""
    problem = Problem([(MAX_TOKENS + 1, MAX_TOKENS + 1)])
    calls: list[int] = []

    def body(inputs: Sequence[Tensor], attention: PagedAttention) -> Tensor:
        calls.append(len(inputs[0]))
        return inputs[0]

    recorded = kernels.record(body)
    for _ in range(3):
        recorded((problem.query,), kernels.plan_attention(problem.metadata, problem.block_size))
    assert calls == [MAX_TOKENS + 1] * 3


def test_the_reference_set_runs_the_body() -> None:
    """A set without programs gives the body back."""

    def body(inputs: Sequence[Tensor], attention: PagedAttention) -> Tensor:
        return inputs[0]

    assert build_kernels("reference").record(body) is body
