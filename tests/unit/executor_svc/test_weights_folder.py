"""Loading Hugging Face folders: shards, dtypes, and every way in which tensors can fail to fit the config."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from factories import make_llama, random_weights, save_weights
from paged import PagedLoop, PagedSequence
from safetensors.torch import load_file, save_file
from torch import Tensor

from executor_svc.kernels import build_kernels
from executor_svc.kernels.linear import Linear
from executor_svc.models import CausalLM, load_weights
from executor_svc.weights import ModelLoadError, UnsupportedModelError, WeightsError

CPU = torch.device("cpu")
PROMPT = [5, 17, 200, 31, 8]


def _load(path: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_weights(path, dtype, CPU, build_kernels("cpu"))


def _logits(path: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    return PagedLoop(_load(path, dtype), dtype=dtype).step([(PagedSequence(PROMPT), len(PROMPT))])


def _edit(folder: Path, **changes: Tensor | None) -> None:
    """Change (or take away) tensors of the only safetensors file; the keywords have _ for a dot."""
    weights = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del weights[name.replace("__", ".")]
        else:
            weights[name.replace("__", ".")] = tensor
    save_file(weights, folder / "model.safetensors")


def test_shards_are_one_model(tmp_path: Path) -> None:
    """A model in three files with an index gives bit for bit what it gives in one."""
    whole = make_llama(tmp_path / "whole")
    shards = make_llama(tmp_path / "shards", num_shards=3)
    assert not (shards / "model.safetensors").exists()
    assert torch.equal(_logits(shards), _logits(whole))


def test_other_files_beside_the_model_are_not_read(tmp_path: Path) -> None:
    """The same weights in another naming, as some folders have them too, are left alone."""
    folder = make_llama(tmp_path)
    expected = _logits(folder)
    save_file({"layers.0.attention.wq.weight": torch.zeros(4)}, folder / "consolidated.safetensors")
    assert torch.equal(_logits(folder), expected)


def test_dtype_is_converted_once(tmp_path: Path) -> None:
    """A bfloat16 checkpoint loaded as float32 holds exactly its numbers, and so equals a float32 file of them."""
    narrow = make_llama(tmp_path / "narrow", dtype=torch.bfloat16)
    wide = make_llama(tmp_path / "wide")
    save_weights(wide, {name: tensor.float() for name, tensor in load_file(narrow / "model.safetensors").items()})
    assert torch.equal(_logits(narrow), _logits(wide))


def test_float16_files_are_read(tmp_path: Path) -> None:
    """A float16 checkpoint loads, close to the float32 one that it was rounded from."""
    exact = _logits(make_llama(tmp_path / "exact"))
    torch.testing.assert_close(_logits(make_llama(tmp_path / "half", dtype=torch.float16)), exact, rtol=0, atol=0.02)


def test_unneeded_tensors_are_ignored(tmp_path: Path) -> None:
    """Rotary tables of old checkpoints, and a copy of the head in a tied model, change nothing."""
    folder = make_llama(tmp_path, tie=True)
    expected = _logits(folder)
    tables = {f"model__layers__{index}__self_attn__rotary_emb__inv_freq": torch.ones(6) for index in range(2)}
    _edit(folder, lm_head__weight=torch.zeros(320, 48), **tables)
    assert torch.equal(_logits(folder), expected)


def test_missing_surplus_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    """One error names the file and every kind of misfit, each tensor with its shapes."""
    folder = make_llama(tmp_path)
    _edit(
        folder,
        model__norm__weight=None,
        model__layers__1__mlp__up_proj__weight=torch.zeros(80, 47),
        model__layers__2__mlp__up_proj__weight=torch.zeros(80, 48),
    )
    with pytest.raises(WeightsError) as caught:
        _load(folder)
    message = str(caught.value)
    assert str(folder) in message
    assert "1 tensors missing: model.norm.weight" in message
    assert "1 tensors surplus: model.layers.2.mlp.up_proj.weight" in message
    assert "model.layers.1.mlp.up_proj.weight is [80, 47], not [80, 48]" in message


def test_a_long_list_of_tensors_is_cut(tmp_path: Path) -> None:
    """A checkpoint that lacks a whole layer names some of its tensors and counts the others."""
    folder = make_llama(tmp_path, config={"num_hidden_layers": 4})
    weights = load_file(folder / "model.safetensors")
    save_weights(folder, {name: tensor for name, tensor in weights.items() if ".layers.3." not in name})
    with pytest.raises(WeightsError, match=r"9 tensors missing: model\.layers\.3\.input.* and 1 more"):
        _load(folder)


def test_a_bias_that_the_config_does_not_know_is_surplus(tmp_path: Path) -> None:
    """Weights of another variation than the config's are refused, not half used."""
    folder = make_llama(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    save_weights(folder, random_weights(config, seed=0, qkv_bias=True, dtype=torch.float32))
    with pytest.raises(WeightsError, match=r"6 tensors surplus: model\.layers\.0\.self_attn\.k_proj\.bias"):
        _load(folder)


def test_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    """Only a config that ties head and embedding may leave the head out."""
    folder = make_llama(tmp_path)
    _edit(folder, lm_head__weight=None)
    with pytest.raises(WeightsError, match=r"missing: lm_head\.weight"):
        _load(folder)


def test_missing_files_are_named(tmp_path: Path) -> None:
    """A shard that the index names, a folder without weights, and one without config.json are errors with the path."""
    folder = make_llama(tmp_path / "shards", num_shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"lacks model-00002-of-00002\.safetensors, which"):
        _load(folder)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"holds no \.safetensors file"):
        _load(folder)
    with pytest.raises(
        ModelLoadError, match=r"holds no config\.json: give a Hugging Face model folder or a \.gguf file"
    ):
        _load(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 200, -10])
def test_truncated_files_are_named(tmp_path: Path, keep: int) -> None:
    """A weight file cut anywhere, in its header or its data, is an error that names it."""
    folder = make_llama(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=r"model\.safetensors is damaged or incomplete"):
        _load(folder)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    """Which of two tensors of one name counts is nobody's guess."""
    folder = make_llama(tmp_path, num_shards=2)
    first, second = sorted(folder.glob("*.safetensors"))
    save_file(load_file(first) | load_file(second), second)
    with pytest.raises(WeightsError, match="is in another file too"):
        _load(folder)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    """Quantized tensors in a safetensors file are unsupported, and the message says what is."""
    folder = make_llama(tmp_path)
    _edit(folder, model__norm__weight=torch.ones(48, dtype=torch.int8))
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight is I8; supported: F32, F16, BF16"):
        _load(folder)


def test_plain_weights_are_dropped_once_packed(tmp_path: Path) -> None:
    """The loader never holds two copies: when a layer is packed, all plain weights but the one at hand are gone."""
    kernels = build_kernels("reference")
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def pack(weight: Tensor, bias: Tensor | None) -> Linear:
        nonlocal most
        alive.append(weakref.ref(weight))
        most = max(most, sum(reference() is not None for reference in alive))
        return kernels.pack_linear(weight.clone(), bias)

    load_weights(make_llama(tmp_path, num_layers=3), torch.float32, CPU, replace(kernels, pack_linear=pack))
    assert len(alive) == 3 * 4 + 2
    assert most == 1
