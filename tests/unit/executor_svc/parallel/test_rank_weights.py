"""What of a checkpoint each rank reads, and how much memory its part takes."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import gguf
import pytest
import torch
from factories import make_llama
from gguf_families import GGUF_FAMILIES
from gguf_models import make_gguf
from model_variations import FIRSTS, VARIATIONS, Variation, save_variation
from paged import PagedLoop
from ranks import generate
from safetensors.torch import load_file, save_file
from torch import Tensor

from executor_svc.kernels import KernelSet, build_kernels
from executor_svc.kernels.linear import Linear
from executor_svc.models import UnsupportedModelError, shard_config
from executor_svc.models.loader import describe, load_checkpoint
from executor_svc.models.parameters import Counter, Parameters
from executor_svc.models.sharding import shard_spec
from executor_svc.models.spec import DecoderSpec, ExpertsSpec, LinearSpec, Split
from executor_svc.parallel.share import Share
from executor_svc.weights import Checkpoint, Region, open_checkpoint
from executor_svc.weights.safetensors_file import SafetensorsFile
from executor_svc.weights.torch_file import TorchFile

CPU = torch.device("cpu")
REGIONS = [Region((1, 5)), Region(None, (3, 40)), Region((2, 9), (32, 64)), Region((0, 8), (31, 33)), Region((3, 3))]


def _regions_agree(checkpoint: Checkpoint, name: str, regions: list[Region]) -> None:
    whole = torch.empty(checkpoint.shapes[name])
    checkpoint.copy_to(name, whole)
    for region in regions:
        used = replace(region, columns=None) if whole.dim() == 1 else region
        expected = used.of(whole)
        for dtype in (torch.float32, torch.bfloat16):
            out = torch.full(expected.shape, torch.nan, dtype=dtype)
            checkpoint.copy_to(name, out, used)
            assert torch.equal(out, expected.to(dtype)), (name, used)


@pytest.mark.parametrize("name", ["llama with biases", "gpt 2", "gpt neox", "gemma", "qwen3 moe"])
def test_regions_of_a_file_that_was_changed(tmp_path: Path, name: str) -> None:
    """A region of a tensor is that region of the whole, whatever the converter did to its rows and columns."""
    family = GGUF_FAMILIES[name]
    checkpoint = open_checkpoint(family.write(family.make(tmp_path / "folder"), tmp_path / "model.gguf"))
    for tensor in checkpoint.shapes:
        _regions_agree(checkpoint, tensor, REGIONS)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_1", "Q5_0"])
def test_regions_of_packed_rows(tmp_path: Path, kind: str) -> None:
    """Columns that begin or end inside a block come out of the block, those of whole blocks without it."""
    folder = make_llama(tmp_path / "folder", hidden_size=64, intermediate_size=96)
    checkpoint = open_checkpoint(make_gguf(folder, tmp_path / "model.gguf", quantization=kind))
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        _regions_agree(checkpoint, name, [*REGIONS, Region((0, 48), (32, 64))])


def test_regions_of_large_tensors_are_copied_in_parts(tmp_path: Path) -> None:
    """So are tensors of many parts, of each format, and plain ones whose bytes begin at an odd place."""
    generator = torch.Generator().manual_seed(1)
    big = torch.randn(40_011, 64, generator=generator)
    save_file({"big": big, "one": torch.ones(1)}, tmp_path / "model.safetensors")
    torch.save({"big": big}, tmp_path / "model.bin")
    region = Region((7, 40_000), (5, 50))
    for file in (SafetensorsFile(tmp_path / "model.safetensors"), TorchFile(tmp_path / "model.bin")):
        out = torch.empty(39_993, 45)
        file.copy_to("big", out, region)
        assert torch.equal(out, region.of(big))
    folder = make_llama(tmp_path / "folder", hidden_size=64, intermediate_size=96, vocab_size=20_011)
    checkpoint = open_checkpoint(make_gguf(folder, tmp_path / "model.gguf", quantization="Q4_0"))
    _regions_agree(checkpoint, "lm_head.weight", [Region((5, 20_000), (16, 48)), Region((5, 20_000), (0, 32))])


def _linears(spec: DecoderSpec) -> list[LinearSpec]:
    found = [spec.embedding, *filter(None, (spec.head, spec.project_in, spec.project_out))]
    for layer in spec.layers:
        mlps = layer.mlp.experts if isinstance(layer.mlp, ExpertsSpec) else (layer.mlp,)
        found += [layer.qkv, layer.attention_output, *(each for mlp in mlps for each in (mlp.up, mlp.down))]
        if isinstance(layer.mlp, ExpertsSpec):
            found.append(layer.mlp.router)
    return found


def _weight(spec: LinearSpec) -> int:
    return spec.out_features * spec.in_features


@pytest.mark.parametrize("first", FIRSTS, ids=lambda variation: variation.family)
def test_ranks_together_read_every_weight_once(tmp_path: Path, first: Variation) -> None:
    """Put side by side, or for what writes to the residual under one another, the parts of all ranks are the layers."""
    save_variation(tmp_path, first)
    checkpoint = open_checkpoint(tmp_path)
    config, spec = describe(checkpoint)
    kernels = replace(build_kernels("reference"), pack_linear=lambda weight, bias: (weight, bias))
    parameters = Parameters(checkpoint, torch.float32, CPU, kernels, Counter([], None))

    def read(one: DecoderSpec) -> list[tuple[Tensor, Tensor | None]]:
        return [parameters.linear(each) for each in _linears(one)]  # type: ignore[misc]

    parts = [read(shard_spec(spec, config, Share(rank, 2))) for rank in range(2)]
    for index, (whole, linear) in enumerate(zip(read(spec), _linears(spec), strict=True)):
        (weight, bias), (other, other_bias) = parts[0][index], parts[1][index]
        match linear.split:
            case Split.WHOLE:
                assert torch.equal(weight, whole[0])
                assert torch.equal(other, whole[0])
            case Split.ROW:
                assert torch.equal(torch.cat([weight, other], 1), whole[0])
                assert other_bias is None
                assert (bias is None) == (whole[1] is None)
            case _:
                sections = [size // 2 for size in linear.split_sections]
                pairs = zip(weight.split(sections), other.split(sections), strict=True)
                assert torch.equal(torch.cat([part for pair in pairs for part in pair]), whole[0])


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("first", FIRSTS, ids=lambda variation: variation.family)
def test_weight_memory_is_divided(tmp_path: Path, first: Variation, size: int) -> None:
    """The bytes that a rank packs are 1/N of the layers', and the remainder that docs/running.md states: what is whole
    on each rank (norms, positions, routers, the projections of a narrow embedding), and KV heads that ranks share.
    """
    save_variation(tmp_path, first)
    checkpoint = open_checkpoint(tmp_path)
    config, spec = describe(checkpoint)
    divided = sum(_weight(each) for each in _linears(spec) if each.split is not Split.WHOLE)
    whole = sum(_weight(each) for each in _linears(spec) if each.split is Split.WHOLE)
    copies = max(1, size // config.num_kv_heads)
    keys = 2 * config.num_layers * config.num_kv_heads * config.head_dim * config.hidden_size
    shared = keys * (copies - 1) // size
    packed = [_packed_bytes(checkpoint, Share(rank, size)) for rank in range(size)]
    assert packed == [4 * (divided // size + whole + shared)] * size
    # Beside them a rank has norms and biases, at most all of the model's.
    assert _others(shard_spec(spec, config, Share(0, size))) <= _others(spec)


def _packed_bytes(checkpoint: Checkpoint, share: Share) -> int:
    """Load a rank's part, and return the bytes of the weights that were packed."""
    total = 0
    kernels = build_kernels("reference")

    def pack_linear(weight: Tensor, bias: Tensor | None) -> Linear:
        nonlocal total
        total += weight.nbytes
        return kernels.pack_linear(weight, bias)

    _load_alone(checkpoint, replace(kernels, pack_linear=pack_linear), share)
    return total


def _others(spec: DecoderSpec) -> int:
    """Return the elements of what is neither a weight of a layer nor a table of positions."""
    table = spec.positions
    tables = 0 if table is None else table.rows * table.size
    return sum(map(prod, spec.tensors().values())) - tables - sum(map(_weight, _linears(spec)))


class _Alone:
    def __init__(self, share: Share) -> None:
        self.share = share

    def sum(self, x: Tensor) -> None:
        pass


def _load_alone(checkpoint: Checkpoint, kernels: KernelSet, share: Share) -> None:
    ranks = _Alone(share)
    load_checkpoint(checkpoint, torch.float32, CPU, kernels, None, None, ranks=ranks)  # type: ignore[arg-type]


@pytest.mark.parametrize(("quantization", "size"), [("F32", 3), ("Q8_0", 3), ("Q8_0", 2)])
def test_files_divide_too(tmp_path: Path, quantization: str, size: int) -> None:
    """Ranks of a GGUF file write what one does, though their inner features begin inside of blocks, and where there are
    two, one has a KV head more than the other.
    """
    shape = {"hidden_size": 96, "intermediate_size": 160, "num_heads": 6, "num_kv_heads": 3, "vocab_size": 331}
    folder = make_llama(tmp_path / "folder", **shape)  # type: ignore[arg-type]
    path = make_gguf(folder, tmp_path / "model.gguf", quantization=quantization)
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_0][0] == 32
    kernels, prompts = build_kernels("cpu"), [[5, 17, 200], [31, 8, 44, 45, 46]]
    whole = load_checkpoint(open_checkpoint(path), torch.float32, CPU, kernels)
    expected = PagedLoop(whole, num_blocks=64, block_size=8).generate(prompts, 5, chunk=4)
    found = generate(
        size,
        lambda ranks: load_checkpoint(open_checkpoint(path), torch.float32, CPU, kernels, ranks=ranks),
        prompts,
        5,
        chunk=4,
    )
    assert found == expected


@pytest.mark.parametrize(
    ("heads", "size", "possible"),
    [
        (
            (9, 3),
            4,
            "the 9 attention heads, 3 KV heads and 80 inner features .* among 4 ranks; they can among 1, 2, 3, 9$",
        ),
        ((8, 2), 3, "they can among 1, 2, 4, 8$"),
        ((12, 4), 6, "they can among 1, 2, 3, 4, 12$"),
    ],
)
def test_heads_that_cannot_be_divided_are_refused(
    tmp_path: Path, heads: tuple[int, int], size: int, possible: str
) -> None:
    """With the numbers, and with those that would do."""
    folder = make_llama(tmp_path, hidden_size=72, head_dim=8, num_heads=heads[0], num_kv_heads=heads[1])
    config, _ = describe(open_checkpoint(folder))
    with pytest.raises(UnsupportedModelError, match=f"--tensor-parallel {size}: .*{possible}"):
        shard_config(config, Share(0, size))


def test_inner_features_need_not_divide_evenly(tmp_path: Path) -> None:
    """Ranks have as many as there are, none more than one more than another."""
    variation = next(each for each in VARIATIONS if each.id == "GPT-2, plain")
    save_variation(tmp_path, replace(variation, fields={"n_inner": 75}))
    config, spec = describe(open_checkpoint(tmp_path))
    widths = [shard_spec(spec, config, Share(rank, 4)).layers[0].mlp for rank in range(4)]
    assert [each.down.in_features for each in widths] == [18, 19, 19, 19]  # type: ignore[union-attr]
    assert load_file(tmp_path / "model.safetensors")
