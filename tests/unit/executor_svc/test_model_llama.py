"""The decoder against transformers: shapes of heads, whole and in pieces, alone and in ragged batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from factories import make_llama
from paged import PagedLoop, PagedSequence
from torch import Tensor
from transformers import AutoModelForCausalLM

from executor_svc.kernels import build_kernels
from executor_svc.models import CausalLM, load_weights

CPU = torch.device("cpu")
LENGTHS = (1, 15, 16, 17, 33, 70)
VARIATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "every head its own keys": {"num_kv_heads": 4},
    "one key head": {"num_kv_heads": 1},
    "heads 9 to 3": {"hidden_size": 72, "num_heads": 9, "num_kv_heads": 3},
    "odd vocabulary": {"vocab_size": 331},
}
"""Shapes that those of test_model_families are not."""


def _prompts(*lengths: int, vocab_size: int = 320) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def _transformers(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def _octavo(folder: Path, kernels: str = "cpu", dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_weights(folder, dtype, CPU, build_kernels(kernels))


def _greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def _logits(loop: PagedLoop, prompt: list[int], chunk: int) -> Tensor:
    """Return the logits at the end of every chunk, [number of chunks, vocab]."""
    sequence, rows = PagedSequence(prompt), []
    while sequence.num_computed < len(prompt):
        rows.append(loop.step([(sequence, min(chunk, len(prompt) - sequence.num_computed))])[0])
    return torch.stack(rows)


@pytest.mark.parametrize("variation", list(VARIATIONS))
def test_logits_and_greedy_tokens(tmp_path: Path, variation: str) -> None:
    """Logits agree with transformers to 1e-5 of the largest, and greedy tokens with `generate` exactly.

    The prompts decode in one ragged batch over memory full of NaN, prefilled by chunks of odd and different sizes.
    """
    folder = make_llama(tmp_path, **VARIATIONS[variation])
    theirs, ours = _transformers(folder), _octavo(folder)
    prompts = _prompts(*LENGTHS)
    longest = prompts[-1]
    with torch.inference_mode():
        expected = theirs(torch.tensor([longest])).logits[0]
    step_by_step = _logits(PagedLoop(ours), longest, chunk=1)
    bound = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(step_by_step, expected, rtol=0, atol=bound)
    for chunk in (7, len(longest)):
        last = _logits(PagedLoop(ours), longest, chunk)[-1]
        torch.testing.assert_close(last, expected[-1], rtol=0, atol=bound)
    expected_tokens = [_greedy(theirs, prompt, 8) for prompt in prompts]
    assert PagedLoop(ours).generate(prompts, 8, chunk=5) == expected_tokens


@pytest.mark.parametrize("chunk", [1, 16, 200])
@pytest.mark.parametrize("block_size", [3, 16])
@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_batching_does_not_change_greedy_tokens(tmp_path: Path, kernels: str, block_size: int, chunk: int) -> None:
    """Alone or in a ragged batch, whatever the chunks and the block size, in both kernel sets: the tokens are the
    same.
    """
    model = _octavo(make_llama(tmp_path, seed=2), kernels)
    prompts = _prompts(2, 16, 31)
    alone = [PagedLoop(model, block_size=block_size).generate([prompt], 6, chunk=len(prompt))[0] for prompt in prompts]
    assert PagedLoop(model, block_size=block_size).generate(prompts, 6, chunk=chunk) == alone
    assert len({tuple(tokens) for tokens in alone}) == 3


def test_greedy_output_is_worth_comparing(tmp_path: Path) -> None:
    """The tiny models do not repeat themselves: their greedy output has many different tokens."""
    tokens = PagedLoop(_octavo(make_llama(tmp_path, tie=True))).generate(_prompts(5), 40, chunk=5)[0]
    assert len(set(tokens)) > 15


def test_reused_blocks_leave_no_trace(tmp_path: Path) -> None:
    """A sequence in blocks that another one filled gets the logits that it gets in blocks full of NaN."""
    model = _octavo(make_llama(tmp_path))
    first, second = _prompts(60, 33)
    clean = PagedLoop(model).step([(PagedSequence(second), 33)])
    loop = PagedLoop(model)
    former = PagedSequence(first)
    loop.step([(former, 60)])
    reused = loop.step([(PagedSequence(second, blocks=former.blocks[::-1]), 33)])
    assert torch.equal(reused, clean)


def test_a_sequence_with_nan_harms_no_other(tmp_path: Path) -> None:
    """NaN in one sequence's KV makes its logits NaN, and changes no bit of its neighbours' in the same decode batch."""
    model = _octavo(make_llama(tmp_path))
    prompts = _prompts(20, 21, 22)

    def decode(poison: bool) -> Tensor:
        loop = PagedLoop(model)
        sequences = [PagedSequence(prompt) for prompt in prompts]
        loop.step([(sequence, len(sequence.token_ids) - 1) for sequence in sequences])
        if poison:
            loop.poison(sequences[1])
        return loop.step([(sequence, 1) for sequence in sequences])

    sound, poisoned = decode(False), decode(True)
    assert poisoned[1].isnan().all()
    assert torch.equal(poisoned[[0, 2]], sound[[0, 2]])


def test_bfloat16_is_close_to_transformers_bfloat16(tmp_path: Path) -> None:
    """In bfloat16 the logprobs of both stray equally little from float32's: mean distance below 0.05 nats to each
    other.
    """
    folder = make_llama(tmp_path, dtype=torch.bfloat16)
    prompt = _prompts(70)[0]
    with torch.inference_mode():
        exact = _transformers(folder)(torch.tensor([prompt])).logits[0].log_softmax(-1)
        theirs = _transformers(folder, torch.bfloat16)(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    for kernels in ("reference", "cpu"):
        loop = PagedLoop(_octavo(folder, kernels, torch.bfloat16), dtype=torch.bfloat16)
        ours = _logits(loop, prompt, chunk=1).log_softmax(-1)
        assert float((ours - theirs).abs().mean()) < 0.05
        assert float((ours - exact).abs().mean()) < 1.5 * float((theirs - exact).abs().mean())


def test_no_hidden_states_give_no_logits(tmp_path: Path) -> None:
    """A step in which no row samples has an empty logits tensor of the right shape and dtype."""
    logits = _octavo(make_llama(tmp_path)).compute_logits(torch.empty(0, 48))
    assert logits.shape == (0, 320)
    assert logits.dtype == torch.float32
