"""GGUF files of every architecture, run: logits against transformers', in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf_families import GGUF_FAMILIES, VOCAB_SIZE
from paged import PagedLoop, PagedSequence
from reference import Reference

from executor_svc.kernels import build_kernels
from executor_svc.models import load_weights

BOUND = 1e-5
"""Of the largest logit."""
PROMPT = torch.randint(3, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(3)).tolist()
"""Longer than every window of the tiny models, and within the context that none of them stretches."""


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
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
