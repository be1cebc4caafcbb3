"""Models of no family, run by transformers' own code over paged attention; and what is refused, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_variations import FALLBACKS, save_fallback
from paged import PagedLoop, PagedSequence

from executor_svc.kernels import build_kernels
from executor_svc.models import UnsupportedModelError, WeightsError
from executor_svc.models.transformers_lm import TransformersLM, load_transformers_lm, read_transformers_config

LENGTH, BLOCK_SIZE = 45, 8

EVERYDAY = ("StableLmConfig", "Cohere2Config", "OlmoeConfig")
"""Run by `make test`, with the compiled kernels; the others are left to `make test-full`."""


def _load(folder: Path, kernels: str = "cpu") -> TransformersLM:
    return load_transformers_lm(folder, torch.float32, torch.device("cpu"), build_kernels(kernels))


def _prompt(length: int, seed: int = 7) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 320, (length,), generator=generator).tolist()


def _theirs(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens])).logits[0]
    return logits


def _loop(model: TransformersLM) -> PagedLoop:
    return PagedLoop(model, num_blocks=64, block_size=BLOCK_SIZE)


@pytest.mark.parametrize(
    ("config", "kernels"),
    [
        pytest.param(config, kernels, marks=() if config in EVERYDAY and kernels == "cpu" else pytest.mark.full)
        for config in FALLBACKS
        for kernels in ("reference", "cpu")
    ],
)
def test_as_transformers_alone(tmp_path: Path, config: str, kernels: str) -> None:
    """Logits agree to 1e-5 of the largest, whole, by chunks, token by token and behind a cached prefix; greedy tokens
    of a ragged batch are equal.
    """
    theirs = save_fallback(tmp_path, config)
    model, prompt = _load(tmp_path, kernels), _prompt(LENGTH)
    expected = _theirs(theirs, prompt)
    bound = 1e-5 * float(expected.abs().max())
    for chunk in (1, 7, LENGTH):
        loop, sequence, rows = _loop(model), PagedSequence(prompt), []
        while sequence.num_computed < LENGTH:
            rows.append(loop.step([(sequence, min(chunk, LENGTH - sequence.num_computed))])[0])
        ends = [*range(chunk - 1, LENGTH - 1, chunk), LENGTH - 1]
        torch.testing.assert_close(torch.stack(rows), expected[ends], rtol=0, atol=bound)
    other = prompt[: 3 * BLOCK_SIZE] + _prompt(10, seed=8)
    shared = PagedSequence(other, blocks=sequence.blocks[:3], num_computed=3 * BLOCK_SIZE)
    torch.testing.assert_close(loop.step([(shared, 10)])[0], _theirs(theirs, other)[-1], rtol=0, atol=bound)
    prompts = [_prompt(length, seed=length) for length in (1, 16, 23)]
    tokens = [list(each) for each in prompts]
    for each in tokens:
        for _ in range(4):
            each.append(int(_theirs(theirs, each)[-1].argmax()))
    expected_tokens = [each[-4:] for each in tokens]
    assert _loop(model).generate(prompts, 4, chunk=5) == expected_tokens


def test_what_is_read_without_weights(tmp_path: Path) -> None:
    """KV heads, their width and the window are those that the layers ask attention for."""
    save_fallback(tmp_path / "mixed", "Cohere2Config")
    mixed = read_transformers_config(tmp_path / "mixed")
    assert (mixed.num_layers, mixed.num_kv_heads, mixed.head_dim, mixed.window) == (4, 2, 12, 0)
    save_fallback(tmp_path / "all", "Cohere2Config", layer_types=["sliding_attention"] * 4)
    assert read_transformers_config(tmp_path / "all").window == 20
    save_fallback(tmp_path / "one", "GPTBigCodeConfig")
    one = read_transformers_config(tmp_path / "one")
    assert (one.num_kv_heads, one.max_position_embeddings, one.vocab_size) == (1, 128, 320)


_STATE = "recurrent state"
REFUSED = {
    "BloomConfig": ({"n_layer": 2, "n_head": 4, "max_position_embeddings": 128}, "attention does not go through"),
    "FalconConfig": ({"new_decoder_architecture": True, "num_kv_heads": 2}, "attention does not go through"),
    "MambaConfig": ({"state_size": 4, "max_position_embeddings": 128}, _STATE),
    "JambaConfig": ({}, _STATE),
    "GptOssConfig": ({"num_local_experts": 4, "head_dim": 16}, "attention with s_aux"),
    "Lfm2Config": (
        {"layer_types": ["conv", "full_attention"]},
        "1 of its 2 layers, the first of them number 0, keep no",
    ),
    "Llama4TextConfig": (
        {"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 80, "attention_chunk_size": 16},
        "attention_chunk_size is in its mask alone",
    ),
    "BartConfig": (
        {"decoder_layers": 2, "decoder_attention_heads": 4, "d_model": 48},
        "its head apart from its layers",
    ),
    "DbrxConfig": (
        {"n_embd": 1, "d_model": 48, "n_heads": 4, "n_layers": 2, "attn_config": {"rope_theta": 1e4, "clip_qkv": 8}},
        "goes by the numbers in its tensors",
    ),
    "MptConfig": ({"n_embd": 1, "d_model": 48, "n_heads": 4, "n_layers": 2}, "config has no max_position_embeddings"),
}


@pytest.mark.parametrize("config", list(REFUSED))
def test_what_cannot_run_is_refused_with_the_reason(tmp_path: Path, config: str) -> None:
    """No weight is read to tell it."""
    fields, reason = REFUSED[config]
    save_fallback(tmp_path, config, **fields)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match=f"cannot run: .*{reason}"):
        read_transformers_config(tmp_path)


def test_an_encoder_with_a_decoder_is_refused(tmp_path: Path) -> None:
    """Its decoder reads what lies in no block."""
    transformers.T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="T5ForConditionalGeneration is an encoder and a decoder"):
        read_transformers_config(tmp_path)


def test_a_model_that_is_no_causal_one_to_transformers_is_refused(tmp_path: Path) -> None:
    """Such as one that sees, whose text part is of no family."""
    text = {"model_type": "cohere", "vocab_size": 320}
    transformers.LlavaConfig(text_config=text, architectures=["SeeingForConditionalGeneration"]).save_pretrained(
        tmp_path
    )
    with pytest.raises(UnsupportedModelError, match="has no causal language model for model_type 'llava'"):
        read_transformers_config(tmp_path)


def test_code_of_the_models_own_is_refused(tmp_path: Path) -> None:
    """What transformers does not have it would have to run from the folder."""
    (tmp_path / "config.json").write_text(
        '{"architectures": ["OwnForCausalLM"], "model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}',
        encoding="utf-8",
    )
    with pytest.raises(UnsupportedModelError, match="model_type 'own' is none of its own, and code that comes with"):
        read_transformers_config(tmp_path)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_that_depends_on_the_batch_is_refused(tmp_path: Path, kind: str) -> None:
    """transformers turns all of a batch by its longest sequence."""
    factors = [1.0] * 6
    rotary = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        rotary |= {"short_factor": factors, "long_factor": factors, "original_max_position_embeddings": 32}
    save_fallback(tmp_path, "Starcoder2Config", rope_parameters=rotary)
    with pytest.raises(UnsupportedModelError, match=f"its rotary type {kind} depends"):
        read_transformers_config(tmp_path)


def test_missing_tensors_are_an_error(tmp_path: Path) -> None:
    """transformers would fill them with noise."""
    save_fallback(tmp_path, "Starcoder2Config")
    folder = tmp_path / "other"
    save_fallback(folder, "Starcoder2Config", num_hidden_layers=3)
    (tmp_path / "model.safetensors").replace(folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"tensors are missing: model\.layers\.2"):
        _load(folder)


def test_a_model_that_mixes_neighbours_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """State that is not in keys and values shows as soon as a sequence is cut: the load ends there."""
    from transformers.models.starcoder2.modeling_starcoder2 import Starcoder2MLP

    save_fallback(tmp_path, "Starcoder2Config")
    plain = Starcoder2MLP.forward
    monkeypatch.setattr(Starcoder2MLP, "forward", lambda self, x: plain(self, x + x.roll(1, dims=1)))
    with pytest.raises(UnsupportedModelError, match="depends on how its tokens are spread over steps"):
        _load(tmp_path)


def test_no_hidden_states_give_no_logits(tmp_path: Path) -> None:
    """A step in which no row samples has an empty logits tensor of the right shape and dtype."""
    save_fallback(tmp_path, "Starcoder2Config")
    logits = _load(tmp_path).compute_logits(torch.empty(0, 48))
    assert (logits.shape, logits.dtype) == ((0, 320), torch.float32)
