"""GGUF files of every architecture: names, shapes and numbers of the tensors, and what the config asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_families import GGUF_FAMILIES
from safetensors.torch import load_file
from transformers import AutoConfig

from executor_svc.weights import open_checkpoint

_IRRELEVANT = {
    "_name_or_path",
    "_sliding_window_pattern",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "pad_token_id",
    "transformers_version",
    "use_cache",
}
"""Fields that say nothing of what a trained model computes, or that the tokenizer and defaults say."""
_DERIVED = {"head_dim", "n_inner"}
"""Fields that may be left out, for what follows from others: a file always says them."""


@pytest.mark.parametrize("name", GGUF_FAMILIES)
def test_every_tensor_comes_back(tmp_path: Path, name: str) -> None:
    """Names, shapes and float32 numbers are those of the folder that transformers saved, whatever was changed."""
    family = GGUF_FAMILIES[name]
    folder = family.make(tmp_path / "folder")
    checkpoint = open_checkpoint(family.write(folder, tmp_path / "model.gguf"))
    expected = load_file(folder / "model.safetensors")
    assert dict(checkpoint.shapes) == {name: tuple(tensor.shape) for name, tensor in expected.items()}
    for tensor_name, tensor in expected.items():
        out = torch.empty_like(tensor)
        checkpoint.copy_to(tensor_name, out)
        torch.testing.assert_close(out, tensor, rtol=0, atol=2e-7 if family.plus_one else 0)


# GGUF does not tell Mistral from Llama, which it is where it has no window.
@pytest.mark.parametrize("name", sorted(GGUF_FAMILIES.keys() - {"mistral"}))
def test_the_config_is_the_folder_s(tmp_path: Path, name: str) -> None:
    """transformers makes of the file's config what it makes of the folder's: every field that a model computes by."""
    family = GGUF_FAMILIES[name]
    folder = family.make(tmp_path / "folder")
    checkpoint = open_checkpoint(family.write(folder, tmp_path / "model.gguf"))
    fields = {key: value for key, value in checkpoint.config.items() if key != "model_type"}
    found = AutoConfig.for_model(checkpoint.config["model_type"], **fields).to_dict()
    expected = AutoConfig.from_pretrained(folder).to_dict()
    for key in expected.keys() - _IRRELEVANT:
        if expected[key] is None and key in _DERIVED:
            continue
        assert _agree(found.get(key), expected[key]), (key, found.get(key), expected[key])


def _agree(found: Any, expected: Any) -> bool:
    """Whether two values are the same, but for what float32 in the file takes off a number."""
    if isinstance(expected, Mapping):
        return isinstance(found, Mapping) and all(_agree(found.get(key), value) for key, value in expected.items())
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(_agree, found, expected))
    if isinstance(expected, float) or isinstance(found, float):
        return math.isclose(found, expected, rel_tol=1e-6)
    return bool(found == expected)
