"""GGUF files of every architecture, run: logits against transformers', in float32."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from factories import make_llama, save_weights
from gguf.quants import dequantize
from gguf_families import GGUF_FAMILIES, VOCAB_SIZE
from gguf_models import make_gguf, superblocks_of_spread
from paged import PagedLoop, PagedSequence
from reference import Reference
from safetensors.torch import load_file

from executor_svc.kernels import build_kernels
from executor_svc.models import load_weights

BOUND = 1e-5
"""Of the largest logit."""
PROMPT = torch.randint(3, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(3)).tolist()
"""Longer than every window of the tiny models, and within the context that none of them stretches."""


@pytest.mark.parametrize("kernels", [pytest.param("reference", marks=pytest.mark.full), "cpu"])
@pytest.mark.parametrize("name", GGUF_FAMILIES)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str, kernels: str) -> None:
    """A float32 file gives, at every position, the logits that transformers computes from the folder of the model."""
    family = GGUF_FAMILIES[name]
    folder = family.make(tmp_path / "folder")
    path = family.write(folder, tmp_path / "model.gguf")
    expected = Reference.open(folder).logits(PROMPT)
    model = load_weights(path, torch.float32, torch.device("cpu"), build_kernels(kernels), max_model_len=64)
    loop, sequence = PagedLoop(model), PagedSequence(PROMPT)
    found = torch.cat([loop.step([(sequence, 1)]) for _ in PROMPT])
    torch.testing.assert_close(found, expected, rtol=0, atol=BOUND * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["llama", "gemma 3", "gpt 2", "gpt neox", "phi 3", "mixtral"])
def test_packed_files_run(tmp_path: Path, name: str) -> None:
    """A Q8_0 file of each way in which files differ from folders stays close to the model that it was made from."""
    family = GGUF_FAMILIES[name]
    folder = family.make(tmp_path / "folder")
    path = family.write(folder, tmp_path / "model.gguf", quantization="Q8_0")
    kernels = build_kernels("cpu")
    exact, packed = (
        PagedLoop(load_weights(each, torch.float32, torch.device("cpu"), kernels)).step([(PagedSequence(PROMPT), 40)])
        for each in (folder, path)
    )
    assert 0 < float((packed - exact).abs().max()) < 0.1 * float(exact.abs().max())


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_whole_models_of_k_quants(tmp_path: Path, kind: str) -> None:
    """A model whose every matrix is random superblocks, the head of another type as in published files, gives the
    logits that transformers computes from gguf's own dequantized numbers.
    """
    folder = make_llama(tmp_path, hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2)
    packed, plain = {}, {}
    for seed, (name, tensor) in enumerate(load_file(folder / "model.safetensors").items()):
        number = gguf.GGMLQuantizationType["Q6_K" if name == "lm_head.weight" else kind]
        if tensor.dim() == 1:
            plain[name] = tensor
            continue
        spread = 0.1 if "embed" in name else 1.5 / tensor.shape[1] ** 0.5
        packed[name] = superblocks_of_spread(number, tensor.shape, seed, spread), number
        plain[name] = torch.from_numpy(dequantize(packed[name][0], number).copy())
        if "q_proj" in name or "k_proj" in name:
            plain[name] = plain[name].unflatten(0, (-1, 32, 2)).transpose(1, 2).flatten(0, 2)
    save_weights(folder, {name: tensor.contiguous() for name, tensor in plain.items()})
    expected = Reference.open(folder).logits(PROMPT)
    path = make_gguf(folder, tmp_path / "model.gguf", packed=packed)
    model = load_weights(path, torch.float32, torch.device("cpu"), build_kernels("cpu"), max_model_len=64)
    loop, sequence = PagedLoop(model), PagedSequence(PROMPT)
    found = torch.cat([loop.step([(sequence, 1)]) for _ in PROMPT])
    torch.testing.assert_close(found, expected, rtol=0, atol=BOUND * float(expected.abs().max()))
