"""Every family and variation against transformers, in float32, with both kernel sets."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_variations import FIRSTS, RARER, VARIATIONS, Variation, save_variation
from paged import PagedLoop, PagedSequence
from torch import Tensor

from executor_svc.kernels import build_kernels
from executor_svc.models import CausalLM, load_weights
from executor_svc.models.loader import describe
from executor_svc.models.spec import MlpSpec, Split
from executor_svc.weights import open_checkpoint

CPU = torch.device("cpu")
BLOCK_SIZE = 8
LENGTH = 45
"""Tokens of the long prompt: past twice the window, and no multiple of the block size."""
BOUND = 1e-5
"""Of the largest logit."""

Saved = Callable[[Variation], tuple[Path, Any]]
OF_EACH_FAMILY = [*FIRSTS, *(pytest.param(each, marks=pytest.mark.full) for each in RARER)]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Gives the folder of a variation and transformers' model, each made once."""

    @cache
    def save(variation: Variation) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp("model")
        return folder, save_variation(folder, variation)

    return lambda variation: save(variation)


@pytest.fixture(scope="module", params=["reference", "cpu"])
def kernels(request: pytest.FixtureRequest) -> str:
    """Name of the kernel set."""
    name: str = request.param
    return name


@pytest.fixture(params=VARIATIONS + RARER, ids=lambda variation: variation.id)
def variation(request: pytest.FixtureRequest) -> Variation:
    """Each of them."""
    one: Variation = request.param
    return one


def _prompt(length: int, seed: int = 7) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 320, (length,), generator=generator).tolist()


def _theirs(model: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([tokens])).logits[0]
    return logits


def _load(folder: Path, variation: Variation, kernels: str) -> CausalLM:
    return load_weights(folder, torch.float32, CPU, build_kernels(kernels), max_model_len=variation.max_model_len)


def _loop(model: CausalLM) -> PagedLoop:
    return PagedLoop(model, num_blocks=64, block_size=BLOCK_SIZE)


def _free_passed(sequence: PagedSequence, window: int) -> None:
    """Give up the blocks that every layer's window has passed, as the scheduler does."""
    passed = max(0, sequence.num_computed + 1 - window) // BLOCK_SIZE if window else 0
    sequence.blocks[:passed] = [0] * passed


def _chunked(model: CausalLM, prompt: list[int], chunk: int, window: int) -> Tensor:
    loop, sequence, rows = _loop(model), PagedSequence(prompt), []
    while sequence.num_computed < len(prompt):
        rows.append(loop.step([(sequence, min(chunk, len(prompt) - sequence.num_computed))])[0])
        _free_passed(sequence, window)
    return torch.stack(rows)


def test_logits(saved: Saved, variation: Variation, kernels: str) -> None:
    """Logits agree with transformers to 1e-5 of the largest: the prompt whole, by chunks, token by token, behind a
    prefix that another sequence computed, and past every window with the passed blocks given up, over memory full of
    NaN.
    """
    folder, theirs = saved(variation)
    model, prompt = _load(folder, variation, kernels), _prompt(LENGTH)
    expected = _theirs(theirs, prompt)
    bound = BOUND * float(expected.abs().max())
    window = model.config.window
    whole = _loop(model).step([(PagedSequence(prompt), LENGTH)])[0]
    torch.testing.assert_close(whole, expected[-1], rtol=0, atol=bound)
    chunks = _chunked(model, prompt, 7, window)
    torch.testing.assert_close(chunks, expected[[*range(6, LENGTH, 7), LENGTH - 1]], rtol=0, atol=bound)
    torch.testing.assert_close(_chunked(model, prompt, 1, window), expected, rtol=0, atol=bound)
    loop, first = _loop(model), PagedSequence(prompt)
    loop.step([(first, LENGTH)])
    other = prompt[: 3 * BLOCK_SIZE] + _prompt(10, seed=8)
    shared = PagedSequence(other, blocks=first.blocks[:3], num_computed=3 * BLOCK_SIZE)
    _free_passed(shared, window)
    expected = _theirs(theirs, other)[-1]
    torch.testing.assert_close(loop.step([(shared, 10)])[0], expected, rtol=0, atol=bound)


def test_greedy_tokens_in_batches(saved: Saved, variation: Variation, kernels: str) -> None:
    """Prompts of different lengths, in one ragged batch and by chunks of different sizes, continue with the tokens that
    transformers gives each of them alone.
    """
    folder, theirs = saved(variation)
    prompts = [_prompt(length + variation.shortest, seed=length) for length in (0, 15, 22)]
    expected = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(5):
            tokens.append(int(_theirs(theirs, tokens)[-1].argmax()))
        expected.append(tokens[len(prompt) :])
    assert _loop(_load(folder, variation, kernels)).generate(prompts, 5, chunk=5) == expected
    assert len({tuple(tokens) for tokens in expected}) > 1


def test_names(saved: Saved, variation: Variation) -> None:
    """Every tensor that transformers saved is named once, in its shape, and none else."""
    folder, _ = saved(variation)
    checkpoint = open_checkpoint(folder)
    _, spec = describe(checkpoint)
    named = spec.tensors()
    assert {name: checkpoint.shapes[name] for name in named} == named
    assert checkpoint.shapes.keys() - named.keys() <= spec.ignored
    seen = [
        name
        for name in checkpoint.shapes
        if not name.startswith(("vision_tower.", "multi_modal_projector.", "visual."))
    ]
    assert sorted(seen) == sorted(named)


def test_splits(saved: Saved, variation: Variation) -> None:
    """Every linear layer says how ranks divide it: what attention and MLP read by output features, queries, keys,
    values, gate and up each by themselves, what they write by input features, the vocabulary by tokens.
    """
    config, spec = describe(open_checkpoint(saved(variation)[0]))
    kv_size = config.num_kv_heads * config.head_dim
    for layer in spec.layers:
        assert layer.qkv.split_sections == (config.num_heads * config.head_dim, kv_size, kv_size)
        mlps = [layer.mlp] if isinstance(layer.mlp, MlpSpec) else layer.mlp.experts
        for mlp in mlps:
            assert mlp.up.split_sections == (mlp.down.in_features,) * (1 + config.gated)
        assert {layer.qkv.split, *(mlp.up.split for mlp in mlps)} == {Split.COLUMN}
        assert {layer.attention_output.split, *(mlp.down.split for mlp in mlps)} == {Split.ROW}
        for linear in (layer.qkv, *(mlp.up for mlp in mlps)):
            assert sum(linear.split_sections) == linear.out_features
    assert {each.split for each in (spec.embedding, spec.head) if each is not None} == {Split.VOCABULARY}


def _rewritten(folder: Path, target: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """Copy a model with another config.json."""
    shutil.copytree(folder, target)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(json.dumps(change(config)), encoding="utf-8")
    return target


def _reloaded(folder: Path, dtype: torch.dtype) -> Any:
    """Have transformers load a model by the class that it is of."""
    (name,) = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    return getattr(transformers, name).from_pretrained(folder, dtype=dtype)


def _agrees(folder: Path) -> bool:
    prompt = _prompt(LENGTH)
    expected = _theirs(_reloaded(folder, torch.float32), prompt)[-1]
    ours = _loop(load_weights(folder, torch.float32, CPU, build_kernels("cpu"))).step([(PagedSequence(prompt), LENGTH)])
    return float((ours[0] - expected).abs().max()) < BOUND * float(expected.abs().max())


@pytest.mark.parametrize("first", OF_EACH_FAMILY, ids=lambda variation: variation.family)
def test_fields_that_a_file_leaves_out(saved: Saved, tmp_path: Path, first: Variation) -> None:
    """With nothing but sizes in config.json the model is what transformers makes of that file."""
    parts = {"text_config", "vision_config"}
    kept = {"architectures", "model_type", "num_local_experts", *parts, *first.sizes, *first.fields}
    folder = _rewritten(
        saved(first)[0], tmp_path / "model", lambda config: {k: config[k] for k in kept & config.keys()}
    )
    assert _agrees(folder)


@pytest.mark.parametrize(
    "first", [each for each in FIRSTS if each.family not in ("GPT-2", "OPT", "Phi-3")], ids=lambda each: each.family
)
def test_older_rotary_fields(saved: Saved, tmp_path: Path, first: Variation) -> None:
    """`rope_theta` and `rope_scaling` beside one another, as files had them before `rope_parameters`, are honoured."""
    older = {"rope_theta": 500.0, "rotary_emb_base": 500, "rotary_pct": 0.5, "rope_local_base_freq": 50.0}

    def change(config: dict[str, Any]) -> dict[str, Any]:
        del config["rope_parameters"]
        return config | older | {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}}

    assert _agrees(_rewritten(saved(first)[0], tmp_path / "model", change))


@pytest.mark.parametrize("first", OF_EACH_FAMILY, ids=lambda variation: variation.family)
def test_bfloat16_strays_no_further_than_theirs(saved: Saved, first: Variation, kernels: str) -> None:
    """In bfloat16 the logprobs stray from float32's hardly more than those of transformers in bfloat16 do."""
    folder, model = saved(first)
    prompt = _prompt(LENGTH)
    exact = _theirs(model, prompt).log_softmax(-1)
    rounded = _reloaded(folder, torch.bfloat16)
    theirs = _theirs(rounded, prompt).float().log_softmax(-1)
    loop = PagedLoop(
        load_weights(folder, torch.bfloat16, CPU, build_kernels(kernels)),
        num_blocks=16,
        block_size=BLOCK_SIZE,
        dtype=torch.bfloat16,
    )
    sequence, rows = PagedSequence(prompt), []
    while sequence.num_computed < LENGTH:
        rows.append(loop.step([(sequence, 1)])[0])
    ours = torch.stack(rows).log_softmax(-1)
    assert float((ours - exact).abs().mean()) < 1.5 * float((theirs - exact).abs().mean())


@pytest.mark.parametrize("first", OF_EACH_FAMILY, ids=lambda variation: variation.family)
def test_company_changes_no_bit(saved: Saved, first: Variation) -> None:
    """With the kernels of the CPU set, which promise it, a sequence's logits have the same bits alone and beside
    others, whole and in chunks.
    """
    model = load_weights(saved(first)[0], torch.float32, CPU, build_kernels("cpu"))
    prompts = [_prompt(length, seed=length) for length in (LENGTH, 9, 30)]
    alone = [_loop(model).step([(PagedSequence(prompt), len(prompt))])[0] for prompt in prompts]
    together = _loop(model).step([(PagedSequence(prompt), len(prompt)) for prompt in prompts])
    assert torch.equal(together, torch.stack(alone))
    assert torch.equal(_chunked(model, prompts[0], 7, 0)[-1], alone[0])


@pytest.mark.parametrize(
    "one",
    [*OF_EACH_FAMILY, *(each for each in VARIATIONS if each not in FIRSTS and "bias" in each.name)],
    ids=lambda variation: variation.id,
)
def test_steps_are_recorded(saved: Saved, caplog: pytest.LogCaptureFixture, one: Variation) -> None:
    """Steps of a shape that came before run as one call, but where experts are chosen, which the log tells. Their bits
    are those of op by op.
    """
    kernels, prompt = build_kernels("cpu"), _prompt(12)
    recorded = load_weights(saved(one)[0], torch.float32, CPU, kernels, max_model_len=one.max_model_len)
    plain = load_weights(
        saved(one)[0], torch.float32, CPU, replace(kernels, record=lambda body: body), max_model_len=one.max_model_len
    )
    with caplog.at_level(logging.INFO, logger="executor_svc.kernels.record"):
        assert torch.equal(_chunked(recorded, prompt, 1, 0), _chunked(plain, prompt, 1, 0))
    reasons = [record.fields["reason"] for record in caplog.records if "op by op" in record.message]  # type: ignore[attr-defined]
    has_experts = any(layer.routed for layer in recorded.config.layers)
    assert len(reasons) == has_experts, reasons
