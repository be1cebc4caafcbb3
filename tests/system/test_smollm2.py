"""The demo model, SmolLM2-135M-Instruct, against transformers on the same weights."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from reference import Reference
from stack import get_load, in_process
from stack_client import generate, generate_all, request_for
from tokenizers import Tokenizer

from octavo.models.ensure import ensure_prepared
from octavo.models.prepared import PreparedModel
from octavo.v1 import inference_pb2

DATA = Path(__file__).parent.parent / "data"
TEXT = (DATA / "lighthouse.txt").read_text()
KEPT = DATA / "lighthouse_smollm2.json"
LENGTHS = (1, 2, 3, 5, 8, 12, 15, 16, 17, 24, 31, 32, 33, 47, 48, 49, 64, 65, 100, 128, 129, 200, 300, 1500)
MAX_TOKENS = 10
# 2 x 30 layers x 3 heads x 64 x 4 bytes x 16 tokens
BLOCK_BYTES = 737_280
ROOM = {"threads": "2", "kv_memory": "600MiB", "max_model_len": "2048"}


@pytest.fixture(scope="session")
def smollm2() -> PreparedModel:
    """The demo model, pulled once for every run of the tests."""
    return ensure_prepared("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def smollm2_reference(smollm2: PreparedModel) -> Reference:
    """The same weights in transformers."""
    return Reference.open(smollm2.weights)


@pytest.fixture(scope="session")
def prompts(smollm2: PreparedModel) -> list[list[int]]:
    """Natural text: stretches of a story, each from the beginning of a sentence, of every length."""
    tokenizer = Tokenizer.from_file(str(smollm2.tokenizer_file))
    sentences = TEXT.replace("\n\n", " ").split(". ")
    prompts = []
    for index, length in enumerate(LENGTHS):
        start = 0 if length > 300 else 2 * index
        ids = tokenizer.encode(". ".join(sentences[start:]), add_special_tokens=False).ids
        assert len(ids) >= length
        prompts.append(ids[:length])
    return prompts


@pytest.fixture(scope="session")
def wanted() -> list[list[int]]:
    """What transformers writes after each prompt. It takes a minute to say it, so its words are kept in a file."""
    kept: list[list[int]] = json.loads(KEPT.read_text())
    return kept


@pytest.mark.full
@pytest.mark.timeout(600)
def test_what_is_kept_is_what_transformers_writes(
    smollm2_reference: Reference, prompts: list[list[int]], wanted: list[list[int]]
) -> None:
    """The file that the other tests compare with, against transformers on the same weights."""
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        written = [smollm2_reference.greedy(prompt, MAX_TOKENS) for prompt in prompts]
    finally:
        torch.set_num_threads(threads)
    assert written == wanted, f"write to {KEPT}:\n{json.dumps(written)}"


async def _greedy(model: PreparedModel, flags: Mapping[str, str], prompts: list[list[int]]) -> list[list[int]]:
    async with in_process(model, flags={**ROOM, **flags}) as stack:
        outputs = await generate_all(stack, [request_for(prompt, MAX_TOKENS) for prompt in prompts])
        load = await get_load(stack)
    assert load.num_desyncs == 0
    return [output.choices[0].token_ids for output in outputs]


@pytest.mark.asyncio
@pytest.mark.timeout(600)
async def test_all_at_once_in_odd_chunks(
    smollm2: PreparedModel, prompts: list[list[int]], wanted: list[list[int]]
) -> None:
    """24 prompts in one batch, chunked at an odd budget, two steps in flight: transformers' tokens."""
    got = await _greedy(smollm2, {"max_num_batched_tokens": "331"}, prompts)
    assert got == wanted


@pytest.mark.full
@pytest.mark.asyncio
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "flags",
    [
        {"depth": "1"},
        {"depth": "2", "max_num_batched_tokens": "509"},
        {"depth": "2", "max_num_batched_tokens": "67", "max_num_seqs": "5"},
    ],
    ids=lambda flags: "-".join(f"{name}={value}" for name, value in flags.items()),
)
async def test_other_ways_of_batching(
    flags: dict[str, str], smollm2: PreparedModel, prompts: list[list[int]], wanted: list[list[int]]
) -> None:
    """A batch of 32 gives transformers' tokens at every depth, budget and row limit."""
    got = await _greedy(smollm2, flags, prompts + prompts[:8])
    assert got == wanted + wanted[:8]


@pytest.mark.full
@pytest.mark.asyncio
@pytest.mark.timeout(900)
async def test_one_at_a_time(smollm2: PreparedModel, prompts: list[list[int]], wanted: list[list[int]]) -> None:
    """Alone in the cell, each prompt gets transformers' tokens."""
    async with in_process(smollm2, flags=ROOM) as stack:
        got = [(await generate(stack, request_for(prompt, MAX_TOKENS))).choices[0].token_ids for prompt in prompts]
    assert got == wanted


@pytest.mark.full
@pytest.mark.asyncio
@pytest.mark.timeout(900)
async def test_preempted_in_a_tiny_pool(
    smollm2: PreparedModel, smollm2_reference: Reference, prompts: list[list[int]]
) -> None:
    """With room for a fraction of what the batch grows to, sequences are preempted and the output is the same."""
    short = [prompt for prompt in prompts if len(prompt) <= 33]
    wanted = [smollm2_reference.greedy(prompt, 48) for prompt in short]
    flags = {**ROOM, "kv_memory": str(21 * BLOCK_BYTES), "max_model_len": "96"}
    async with in_process(smollm2, flags=flags) as stack:
        outputs = await generate_all(stack, [request_for(prompt, 48) for prompt in short])
        load = await get_load(stack)
    assert [output.choices[0].token_ids for output in outputs] == wanted
    assert load.num_preemptions > 0
    assert load.num_desyncs == 0


@pytest.mark.asyncio
@pytest.mark.timeout(300)
async def test_the_answer_is_sensible_and_ends_by_itself(smollm2: PreparedModel) -> None:
    """A chat question gets its answer in English, ended by the end-of-turn token."""
    async with in_process(smollm2, flags=ROOM) as stack:
        request = request_for([])
        request.chat.messages.add(role=inference_pb2.CHAT_ROLE_USER, content="What is the capital of France?")
        choice = (await generate(stack, request)).choices[0]
    assert choice.text == "The capital of France is Paris."
    assert choice.finished is not None
    assert choice.finished.reason == inference_pb2.FINISH_REASON_STOP
    assert choice.finished.stop_token_id in smollm2.eos_token_ids


@pytest.mark.full
@pytest.mark.asyncio
@pytest.mark.timeout(300)
async def test_bfloat16_is_as_near_as_transformers_bfloat16(
    smollm2: PreparedModel, smollm2_reference: Reference, prompts: list[list[int]]
) -> None:
    """bfloat16: logprobs of the generated tokens lie within 0.15 of transformers' bfloat16 on average, none beyond 1.

    Both round at different places, so they differ from each other about as much as each does from float32: that the
    distance to float32 is no more than twice transformers' own is asserted too.
    """
    short = [prompt for prompt in prompts if len(prompt) in (17, 33)]
    async with in_process(smollm2, flags={**ROOM, "dtype": "bfloat16"}) as stack:
        requests = [request_for(prompt, 6, ignore_eos=True) for prompt in short]
        for request in requests:
            request.output.top_logprobs = 0
        outputs = await generate_all(stack, requests)
    bfloat16 = smollm2_reference.in_bfloat16()
    ours, theirs, exact = [], [], []
    for prompt, output in zip(short, outputs, strict=True):
        choice = output.choices[0]
        tokens = [*prompt, *choice.token_ids]
        rows = range(len(prompt) - 1, len(tokens) - 1)
        in_bfloat16, in_float32 = bfloat16.logprobs(tokens), smollm2_reference.logprobs(tokens)
        ours += [each.logprob for each in choice.logprobs]
        theirs += [in_bfloat16[row, tokens[row + 1]].item() for row in rows]
        exact += [in_float32[row, tokens[row + 1]].item() for row in rows]
    ours_t, theirs_t, exact_t = torch.tensor(ours), torch.tensor(theirs), torch.tensor(exact)
    distance = (ours_t - theirs_t).abs()
    assert distance.mean() < 0.15, distance
    assert distance.max() < 1.0, distance
    assert (ours_t - exact_t).abs().mean() < 2 * (theirs_t - exact_t).abs().mean() + 0.02
