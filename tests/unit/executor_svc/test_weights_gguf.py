"""Loading GGUF files: names, row order, metadata, every element type, and files that are not whole."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from factories import make_llama
from gguf.quants import dequantize, quantize
from gguf_models import make_gguf, random_superblocks
from paged import PagedLoop, PagedSequence
from safetensors.torch import load_file
from torch import Tensor

from executor_svc.kernels import build_kernels
from executor_svc.layers.rotary import LinearScaling, RotaryConfig, YarnScaling, inverse_frequencies
from executor_svc.layers.rotary import Llama3Scaling as Llama3
from executor_svc.models import load_weights
from executor_svc.models.loader import describe
from executor_svc.weights import ModelLoadError, UnsupportedModelError, WeightsError, open_checkpoint
from executor_svc.weights.gguf_config import ARCHITECTURES
from executor_svc.weights.gguf_types import CHUNK_ELEMENTS, ELEMENT_TYPES, unpack
from octavo.models import ModelError
from octavo.models.gguf_readable import READABLE_ARCHITECTURES, READABLE_TYPES
from octavo.models.prepare import prepare

PROMPT = [5, 17, 200, 31, 8, 44, 45, 46]
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2}


def _logits(path: Path) -> Tensor:
    model = load_weights(path, torch.float32, torch.device("cpu"), build_kernels("cpu"))
    return PagedLoop(model).step([(PagedSequence(PROMPT), len(PROMPT))])


def _rotary(path: Path) -> RotaryConfig | None:
    return describe(open_checkpoint(path))[0].layers[0].rotary


@pytest.mark.parametrize(
    "variation",
    [
        {},
        {"tie": True},
        {"head_dim": 24},
        {"attention_bias": True, "mlp_bias": True},
        {"architecture": "Qwen2ForCausalLM"},
        {"architecture": "MistralForCausalLM"},
        {"rope_theta": 500000.0},
    ],
    ids=lambda variation: ", ".join(variation) or "plain",
)
def test_a_float32_file_is_the_folder(tmp_path: Path, variation: dict[str, Any]) -> None:
    """The same model in both formats gives bit-equal logits: names, rotary row order, biases and settings all fit."""
    folder = make_llama(tmp_path / "folder", **SHAPE, **variation)
    path = make_gguf(folder, tmp_path / "model.gguf", metadata={"rope.freq_base": variation.get("rope_theta", 1e4)})
    assert torch.equal(_logits(path), _logits(folder))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_element_types(tmp_path: Path, kind: str) -> None:
    """Every matrix of every type is what gguf's own dequantize gives, Q and K in the checkpoint's row order."""
    folder = make_llama(tmp_path / "folder", **SHAPE)
    checkpoint = open_checkpoint(make_gguf(folder, tmp_path / "model.gguf", quantization=kind))
    number = gguf.GGMLQuantizationType[kind]
    for name, tensor in load_file(folder / "model.safetensors").items():
        expected = tensor.numpy()
        if tensor.dim() == 2:
            packed = expected.astype(np.float16) if kind == "F16" else quantize(expected, number)
            expected = dequantize(packed, number)
        out = torch.empty(tensor.shape)
        checkpoint.copy_to(name, out)
        assert np.array_equal(out.numpy(), expected), name


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_k_quants_in_a_file(tmp_path: Path, kind: str) -> None:
    """Matrices of random superblocks come out as gguf's own dequantize has them, Q and K in the checkpoint's order."""
    number = gguf.GGMLQuantizationType[kind]
    folder = make_llama(tmp_path / "folder", hidden_size=256, intermediate_size=256, num_heads=4, num_kv_heads=2)
    packed = {
        name: (random_superblocks(number, tensor.shape, seed), number)
        for seed, (name, tensor) in enumerate(load_file(folder / "model.safetensors").items())
        if tensor.dim() == 2
    }
    checkpoint = open_checkpoint(make_gguf(folder, tmp_path / "model.gguf", packed=packed))
    for name, (rows, _) in packed.items():
        expected = torch.from_numpy(dequantize(rows, number))
        if "q_proj" in name or "k_proj" in name:
            expected = expected.unflatten(0, (-1, 32, 2)).transpose(1, 2).flatten(0, 2)
        out = torch.empty(expected.shape, dtype=torch.bfloat16)
        checkpoint.copy_to(name, out)
        assert torch.equal(out, expected.bfloat16()), name


def test_large_tensors_are_copied_in_parts(tmp_path: Path) -> None:
    """A tensor of many chunks, dequantized by several threads, is what one call gives; so it is as bfloat16."""
    folder = make_llama(tmp_path / "folder", **SHAPE, vocab_size=20011)
    checkpoint = open_checkpoint(make_gguf(folder, tmp_path / "model.gguf", quantization="Q4_1"))
    kind = gguf.GGMLQuantizationType.Q4_1
    weight = load_file(folder / "model.safetensors")["lm_head.weight"].numpy()
    expected = torch.from_numpy(dequantize(quantize(weight, kind), kind))
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(20011, 64, dtype=dtype)
        checkpoint.copy_to("lm_head.weight", out)
        assert torch.equal(out, expected.to(dtype))


def test_supported_types_are_those_of_gguf() -> None:
    """Every type that is read has the number, the name and the block of the gguf package."""
    for number, kind in ELEMENT_TYPES.items():
        known = gguf.GGMLQuantizationType(number)
        assert kind.name == known.name
        assert (kind.block_elements, kind.block_bytes) == gguf.GGML_QUANT_SIZES[known]


# Infinite scales make NaN; numpy says so on whichever thread it happens.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("number", ELEMENT_TYPES, ids=lambda number: ELEMENT_TYPES[number].name)
def test_any_bytes_unpack_as_gguf_s_own_code_unpacks_them(number: int) -> None:
    """Every bit pattern of every type, infinite scales too, over more than one chunk and into both dtypes."""
    kind = ELEMENT_TYPES[number]
    columns = 512
    rows = CHUNK_ELEMENTS // columns + 7
    row_bytes = columns // kind.block_elements * kind.block_bytes
    packed = np.random.default_rng(number).integers(0, 256, (rows, row_bytes), dtype=np.uint8)
    expected = torch.from_numpy(dequantize(packed, gguf.GGMLQuantizationType(number)).copy())
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(rows, columns, dtype=dtype)
        unpack(torch.from_numpy(packed), number, out)
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.nan_to_num(), expected.to(dtype).nan_to_num())


def test_rope_factors_are_the_llama3_scaling(tmp_path: Path) -> None:
    """A file with a tensor of rotary factors gives what the folder gives whose config names the Llama-3 scaling."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    }
    folder = make_llama(tmp_path / "folder", **SHAPE, rope_scaling=scaling)
    plain = inverse_frequencies(RotaryConfig(16, 10000.0))
    factors = plain / inverse_frequencies(RotaryConfig(16, 10000.0, Llama3(8.0, 1.0, 4.0, 8)))
    path = make_gguf(folder, tmp_path / "model.gguf", rope_freqs=factors)
    torch.testing.assert_close(_logits(path), _logits(folder), rtol=0, atol=1e-5)
    unscaled = make_gguf(folder, tmp_path / "unscaled.gguf")
    assert not torch.allclose(_logits(unscaled), _logits(folder), atol=1e-3)


def test_rotary_metadata(tmp_path: Path) -> None:
    """Linear and YaRN scalings of the metadata become the model's, with GGUF's own defaults."""
    folder = make_llama(tmp_path / "folder", **SHAPE)

    def scaling(**metadata: Any) -> Any:
        keys = {f"rope.scaling.{key}": value for key, value in metadata.items()}
        rotary = _rotary(make_gguf(folder, tmp_path / "model.gguf", metadata=keys))
        assert rotary is not None
        return rotary.scaling

    assert scaling() is None
    assert scaling(type="none") is None
    assert scaling(type="none", factor=4.0) is None
    assert scaling(factor=4.0) == LinearScaling(4.0)
    assert scaling(type="linear", factor=4.0) == LinearScaling(4.0)
    legacy = make_gguf(folder, tmp_path / "legacy.gguf", metadata={"rope.scale_linear": 2.0})
    assert _rotary(legacy) == RotaryConfig(16, 10000.0, LinearScaling(2.0))
    yarn = scaling(type="yarn", factor=4.0, original_context_length=64)
    assert yarn == YarnScaling(4.0, 64, attention_factor=0.1 * math.log(4.0) + 1.0)
    tuned = scaling(type="yarn", factor=2.0, original_context_length=64, attn_factor=0.5, yarn_beta_fast=16.0)
    assert tuned == YarnScaling(2.0, 64, attention_factor=0.5 * (0.1 * math.log(2.0) + 1.0), beta_fast=16.0)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"rope.scaling.type": "dynamic"}, "rotary scaling 'dynamic' is not supported; supported: none, linear, yarn"),
        ({"rope.scaling.type": "longrope"}, r"rotary scaling 'longrope' without rope_factors_long\.weight"),
        ({"rope.scaling.factor": -2.0}, r"rope\.scaling\.factor -2"),
        ({"rope.freq_base": 0.0}, r"rope\.freq_base 0"),
        ({"rope.dimension_count": 18}, r"rope\.dimension_count 18 of a head of 16"),
        ({"rope.dimension_count": 7}, r"rope\.dimension_count 7 of a head of 16"),
        ({"attention.value_length": 32}, r"attention\.value_length 32 other than the key length 16"),
        ({"attention.head_count_kv": [2, 4]}, r"attention\.head_count_kv differs between layers"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    """Metadata that asks for what the decoder does not do stops the load with its name."""
    folder = make_llama(tmp_path / "folder", **SHAPE)
    path = make_gguf(folder, tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(UnsupportedModelError, match=message):
        open_checkpoint(path)


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    """The message names the architecture and those that are known."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "bloom")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    message = "architecture 'bloom' is not supported; supported: gemma, gemma2"
    with pytest.raises(UnsupportedModelError, match=message):
        open_checkpoint(path)
    with pytest.raises(ModelError, match=message):
        prepare(str(path))


def test_what_prepare_takes_is_what_loads() -> None:
    """It knows the architectures and element types by lists of its own, since it needs no torch."""
    assert sorted(ARCHITECTURES) == list(READABLE_ARCHITECTURES)
    assert {number: kind.name for number, kind in ELEMENT_TYPES.items()} == READABLE_TYPES


@pytest.mark.parametrize(
    ("number", "name"), [(24, "I8"), (16, "IQ2_XXS"), (21, "IQ3_S"), (39, "MXFP4"), (999, "type 999")]
)
def test_an_unknown_element_type_is_refused(tmp_path: Path, number: int, name: str) -> None:
    """A tensor of a type that is not read stops prepare and load with its name, its type and what to do."""
    folder = make_llama(tmp_path / "folder", **SHAPE)
    path = make_gguf(folder, tmp_path / "model.gguf", quantization="Q8_0")
    data = path.read_bytes()
    entry = b"token_embd.weight" + (2).to_bytes(4, "little") + (64).to_bytes(8, "little") + (320).to_bytes(8, "little")
    at = data.index(entry) + len(entry)
    path.write_bytes(data[:at] + number.to_bytes(4, "little") + data[at + 4 :])
    message = rf"tensor token_embd\.weight is {name}; supported: F32, .*: take a file of this model in one of these"
    with pytest.raises(UnsupportedModelError, match=message):
        open_checkpoint(path)
    with pytest.raises(ModelError, match=message):
        prepare(str(path))


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    """A surplus tensor keeps its GGUF name in the error."""
    folder = make_llama(tmp_path / "folder", **SHAPE)
    path = make_gguf(folder, tmp_path / "model.gguf", extra={"blk.0.attn_sinks.weight": torch.zeros(4)})
    with pytest.raises(WeightsError, match=r"1 tensors surplus: blk\.0\.attn_sinks\.weight"):
        _logits(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"embedding_length": "wide"}, r"llama\.embedding_length is 'wide', not a whole number"),
        ({"attention.head_count": 0}, r"llama\.attention\.head_count is 0, not at least 1"),
        ({"rope.freq_base": "high"}, r"llama\.rope\.freq_base is 'high', not a number"),
        ({"attention.layer_norm_rms_epsilon": math.nan}, r"layer_norm_rms_epsilon is nan, not a number"),
        ({"rope.scaling.type": 3}, r"llama\.rope\.scaling\.type is 3, not a string"),
    ],
)
def test_keys_of_the_wrong_kind_are_named(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    """A key that holds another kind of value than it should is an error with key and value."""
    folder = make_llama(tmp_path / "folder", **SHAPE)
    path = make_gguf(folder, tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(ModelLoadError, match=message):
        open_checkpoint(path)


def test_missing_keys_are_named(tmp_path: Path) -> None:
    """Metadata without a needed key is an error with the key's name."""
    folder = make_llama(tmp_path / "folder", **SHAPE)
    path = make_gguf(folder, tmp_path / "model.gguf", metadata={"feed_forward_length": None})
    with pytest.raises(ModelLoadError, match=r"lacks llama\.feed_forward_length"):
        open_checkpoint(path)


@pytest.mark.parametrize("keep", [0, 3, 60, 4000, -1000])
def test_files_that_are_not_whole(tmp_path: Path, keep: int) -> None:
    """A file cut anywhere, in header, entries or data, is an error that names it."""
    folder = make_llama(tmp_path / "folder", **SHAPE)
    path = make_gguf(folder, tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"model\.gguf"):
        open_checkpoint(path)
