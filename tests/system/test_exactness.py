"""Greedy float32 output equals transformers' `generate`, token for token, however the cell batches and preempts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from factories import make_llama, prepared_from
from reference import Reference
from stack import Stack, get_load, in_process
from stack_client import Output, generate, generate_all, request_for

from octavo.models.prepared import PreparedModel
from octavo.rpc.errors import from_rpc_error
from octavo.v1 import inference_pb2

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie": True},
    "qkv_bias": {"architecture": "Qwen2ForCausalLM"},
    "all_biases": {"attention_bias": True, "mlp_bias": True},
    "one_kv_head": {"num_heads": 4, "num_kv_heads": 1},
    "as_many_kv_heads": {"num_heads": 3, "num_kv_heads": 3, "head_dim": 16},
    "head_dim_apart": {"num_heads": 3, "num_kv_heads": 1, "head_dim": 24},
    "llama3_rope": {"rope_scaling": LLAMA3, "max_position_embeddings": 512},
    "linear_rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "yarn_rope": {"rope_scaling": YARN, "max_position_embeddings": 256},
}
WAYS: dict[str, dict[str, str]] = {
    "depth_1": {"depth": "1"},
    "depth_2": {"depth": "2"},
    "odd_chunks": {"max_num_batched_tokens": "37"},
    "one_token_a_step": {"max_num_batched_tokens": "1", "max_num_seqs": "1"},
    "few_rows": {"max_num_seqs": "3", "max_num_batched_tokens": "11"},
    "blocks_of_5": {"block_size": "5"},
    "reference_kernels": {"kernels": "reference"},
}
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 97, 130)
MAX_TOKENS = 24


def prompts_of_lengths() -> list[list[int]]:
    """One random prompt of each length, special tokens left out."""
    draw = random.Random(11)
    return [[draw.randrange(3, 270) for _ in range(length)] for length in LENGTHS]


async def greedy(
    model: PreparedModel, flags: Mapping[str, str], prompts: list[list[int]], max_tokens: int
) -> list[list[int]]:
    """What a cell with these flags writes, all prompts at once."""
    async with in_process(model, flags=flags) as stack:
        outputs = await generate_all(stack, [request_for(prompt, max_tokens) for prompt in prompts])
        assert (await get_load(stack)).num_desyncs == 0
    return [output.choices[0].token_ids for output in outputs]


async def generate_until_preempted(stack: Stack, requests: list[inference_pb2.GenerateRequest]) -> list[Output]:
    """Return the outputs of a run in which somebody was preempted: whether anybody is depends on how they arrive."""
    for _ in range(8):
        outputs = await generate_all(stack, requests)
        if (await get_load(stack)).num_preemptions > 0:
            return outputs
    raise AssertionError("nobody was ever preempted")


@pytest.mark.asyncio
@pytest.mark.parametrize("variation", VARIATIONS)
async def test_every_kind_of_model(variation: str, tmp_path: Path) -> None:
    """Each architecture variation gives transformers' tokens."""
    model = prepared_from(make_llama(tmp_path / "model", seed=21, **VARIATIONS[variation]))
    reference = Reference.open(model.weights)
    prompts = prompts_of_lengths()
    wanted = [reference.greedy(prompt, MAX_TOKENS) for prompt in prompts]
    assert await greedy(model, {"max_num_batched_tokens": "61"}, prompts, MAX_TOKENS) == wanted


@pytest.mark.asyncio
@pytest.mark.parametrize("way", WAYS)
async def test_every_way_of_batching(way: str, tiny_model: PreparedModel, reference: Reference) -> None:
    """Depth, chunking, row limits, block size and kernel set change nothing of the output."""
    prompts = prompts_of_lengths()
    wanted = [reference.greedy(prompt, MAX_TOKENS) for prompt in prompts]
    assert await greedy(tiny_model, WAYS[way], prompts, MAX_TOKENS) == wanted


@pytest.mark.asyncio
@pytest.mark.parametrize("depth", ["1", "2", "3"])
async def test_a_tiny_pool_preempts_and_changes_nothing(
    depth: str, tiny_model: PreparedModel, reference: Reference
) -> None:
    """C6 C7 C8: with room for a fraction of the batch, sequences are preempted and the output is the same."""
    prompts = prompts_of_lengths()
    wanted = [reference.greedy(prompt, 60) for prompt in prompts]
    # 2 x 2 layers x 2 heads x 12 x 4 bytes x 16 tokens = 6144 bytes a block: room for 15 blocks.
    async with in_process(tiny_model, flags={"depth": depth, "kv_memory": str(16 * 6144)}) as stack:
        outputs = await generate_until_preempted(stack, [request_for(prompt, 60) for prompt in prompts])
        load = await get_load(stack)
    assert [output.choices[0].token_ids for output in outputs] == wanted
    assert load.num_preemptions > 0
    assert load.num_desyncs == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("depth", ["1", "2"])
async def test_penalties_see_every_token(depth: str, tiny_model: PreparedModel, reference: Reference) -> None:
    """C9 C10: a repetition penalty gives transformers' tokens at any depth, preempted or not."""
    prompts = prompts_of_lengths()
    wanted = [reference.greedy(prompt, 40, repetition_penalty=1.7) for prompt in prompts]
    sampling = inference_pb2.SamplingConfig(temperature=0, repetition_penalty=1.7)
    async with in_process(tiny_model, flags={"depth": depth, "kv_memory": str(16 * 6144)}) as stack:
        requests = [request_for(prompt, 40, sampling=sampling) for prompt in prompts]
        outputs = await generate_until_preempted(stack, requests)
    assert [output.choices[0].token_ids for output in outputs] == wanted


@pytest.mark.asyncio
async def test_sampling_does_not_depend_on_company_or_preemption(tiny_model: PreparedModel) -> None:
    """One seed, one output: alone at depth 1, and among others at depth 3 in a pool that preempts."""
    sampling = inference_pb2.SamplingConfig(
        temperature=1.1, top_p=0.9, top_k=50, frequency_penalty=0.8, presence_penalty=0.4
    )
    requests = [
        request_for(prompt, 50, seed=100 + index, n=2, sampling=sampling)
        for index, prompt in enumerate(prompts_of_lengths())
    ]
    alone: list[list[list[int]]] = []
    async with in_process(tiny_model, flags={"depth": "1"}) as stack:
        for request in requests:
            (output,) = await generate_all(stack, [request])
            alone.append([choice.token_ids for choice in output.choices])
    async with in_process(tiny_model, flags={"depth": "3", "kv_memory": str(16 * 6144)}) as stack:
        together = await generate_until_preempted(stack, requests)
    assert [[choice.token_ids for choice in output.choices] for output in together] == alone


@pytest.mark.asyncio
async def test_a_request_larger_than_the_pool_is_refused_and_small_ones_go_on(tiny_model: PreparedModel) -> None:
    """C1: 8 blocks take 128 tokens: a prompt of 128 or more is refused at once with that number, one of 127 is clamped
    to its one token, and small ones beside and after them are served.
    """
    async with in_process(tiny_model, flags={"kv_memory": str(9 * 6144)}) as stack:
        small = request_for([6] * 10, ignore_eos=True, max_tokens=5)
        running = asyncio.create_task(generate_all(stack, [request_for([5] * 127, ignore_eos=True), small]))
        for length in (128, 129, 500):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await generate(stack, request_for([7] * length, max_tokens=1))
            error = from_rpc_error(raised.value)
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT
            assert f"has {length} tokens; the model takes 128" in error.message
        outputs = [*await running, await generate(stack, small)]
        assert [len(output.choices[0].token_ids) for output in outputs] == [1, 5, 5]
