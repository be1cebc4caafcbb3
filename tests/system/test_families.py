"""Whole cells of other models than Llama: windows that pass, layers that differ, code that is not Octavo's own."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import make_tokenizer, prepared_from
from model_variations import VARIATIONS, Variation, save_fallback, save_variation
from stack import get_load, in_process, wait_idle
from stack_client import generate, generate_all, request_for

from octavo.models.prepared import PreparedModel
from octavo.v1 import inference_pb2

BLOCK = 4
LONG = 100
"""Tokens of an output that leaves every window behind."""


def _variation(family: str, name: str) -> Variation:
    return next(each for each in VARIATIONS if (each.family, each.name) == (family, name))


def _prepared(folder: Path) -> PreparedModel:
    make_tokenizer(folder)
    # The ends that a config class has by default lie far outside a tiny vocabulary.
    for path in folder.glob("*config.json"):
        fields = json.loads(path.read_text()) | {"bos_token_id": 1, "eos_token_id": 2}
        path.write_text(json.dumps(fields))
    return prepared_from(folder)


def _prompts(*lengths: int) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(3, 270) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def _greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


async def _outputs(model: PreparedModel, prompts: list[list[int]], num_tokens: int, **flags: str) -> tuple[Any, Any]:
    """Return what a cell writes, all prompts at once, and its load after that."""
    async with in_process(model, flags=flags) as stack:
        requests = [request_for(prompt, num_tokens, ignore_eos=True) for prompt in prompts]
        outputs = await generate_all(stack, requests)
        load = await wait_idle(stack)
    return [output.choices[0].token_ids for output in outputs], load


@pytest.mark.asyncio
@pytest.mark.parametrize(("family", "name", "is_freed"), [("Mistral", "window", True), ("Mistral", "no window", False)])
async def test_passed_blocks_serve_others(tmp_path: Path, family: str, name: str, *, is_freed: bool) -> None:
    """Three sequences that together are three times as long as the pool run side by side, nobody preempted, since each
    holds no more than its window; without one they cannot. The output is transformers' in both.
    """
    theirs = save_variation(tmp_path, _variation(family, name))
    prompts = _prompts(8, 9, 10)
    # 28 blocks of 4 tokens, keys and values of 2 layers with 2 heads of 12 float32, and the null block.
    memory = 29 * BLOCK * 2 * 2 * 2 * 12 * 4
    outputs, load = await _outputs(_prepared(tmp_path), prompts, LONG, block_size=str(BLOCK), kv_memory=str(memory))
    assert outputs == [_greedy(theirs, prompt, LONG) for prompt in prompts]
    assert (load.num_preemptions == 0) == is_freed
    assert load.num_desyncs == 0


@pytest.mark.asyncio
async def test_a_prefix_is_found_though_its_beginning_is_gone(tmp_path: Path) -> None:
    """Only the blocks within the window of a prompt's end are needed: it counts as cached though those of its beginning
    were given to another prompt, and the output is the same.
    """
    theirs = save_variation(tmp_path, _variation("Mistral", "window"))
    prompt, other = _prompts(60, 60)
    # 24 blocks: two prompts of 15 and their outputs cannot both be kept whole. What passed first is taken first.
    flags = {"block_size": str(BLOCK), "kv_memory": str(25 * BLOCK * 2 * 2 * 2 * 12 * 4), "max_model_len": "96"}
    async with in_process(_prepared(tmp_path), flags=flags) as stack:
        first = await generate(stack, request_for(prompt, 4, ignore_eos=True))
        await wait_idle(stack)
        again = await generate(stack, request_for(prompt, 4, ignore_eos=True))
        await wait_idle(stack)
        await generate(stack, request_for(other, 4, ignore_eos=True))
        await wait_idle(stack)
        late = await generate(stack, request_for(prompt, 4, ignore_eos=True))
        assert (await get_load(stack)).num_desyncs == 0
    expected = _greedy(theirs, prompt, 4)
    assert [each.choices[0].token_ids for each in (first, again, late)] == [expected] * 3
    assert first.usage.cached_tokens == 0
    assert again.usage.cached_tokens == late.usage.cached_tokens == 56


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("Gemma 2", "window on every other layer"),
        ("GPT-2", "plain"),
        ("GPT-NeoX", "parallel"),
        ("OPT", "narrow embedding, norms after the sums (350m)"),
        ("Qwen 3 MoE", "plain"),
        ("Phi-3", "LongRoPE, short factors"),
    ],
)
async def test_a_cell_of_another_family(tmp_path: Path, family: str, name: str) -> None:
    """Greedy output, batched and chunked, is transformers'."""
    theirs = save_variation(tmp_path, _variation(family, name))
    prompts = _prompts(3, 17, 40)
    outputs, load = await _outputs(_prepared(tmp_path), prompts, 12, max_num_batched_tokens="11", block_size="8")
    assert outputs == [_greedy(theirs, prompt, 12) for prompt in prompts]
    assert load.num_desyncs == 0


@pytest.mark.asyncio
async def test_a_cell_of_transformers_own_code(tmp_path: Path) -> None:
    """A model of no family is served by its own code: batched, chunked, from the prefix cache, with seeds; greedy
    output is transformers'.
    """
    theirs = save_fallback(tmp_path, "SeedOssConfig")
    prompts = _prompts(3, 17, 40)
    model = _prepared(tmp_path)
    outputs, load = await _outputs(model, prompts, 12, max_num_batched_tokens="11", block_size="8")
    assert outputs == [_greedy(theirs, prompt, 12) for prompt in prompts]
    assert load.num_desyncs == 0
    async with in_process(model, flags={"block_size": "8"}) as stack:
        request = request_for(
            prompts[2], 12, ignore_eos=True, seed=4, sampling=inference_pb2.SamplingConfig(temperature=1.0)
        )
        cold = await generate(stack, request)
        await wait_idle(stack)
        warm = await generate(stack, request)
    assert warm.choices[0].token_ids == cold.choices[0].token_ids != outputs[2]
    assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, 32)
