"""A model written as a Hugging Face folder: the same tensors, tokenizer and output as the file it came from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf_families import GGUF_FAMILIES
from paged import PagedLoop
from reference import Reference
from tokenizers import Tokenizer

from executor_svc.inspection.export import export
from executor_svc.kernels import build_kernels
from executor_svc.models import load_weights
from executor_svc.weights import open_checkpoint
from octavo.models import ModelError, open_prepared
from octavo.models.location import locate
from octavo.models.prepare import prepare

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["llama", "gemma 3", "gpt neox", "qwen3 moe"])
def test_every_tensor_is_written(tmp_path: Path, name: str) -> None:
    """The folder has a packed file's tensors, unpacked, bit for bit."""
    family = GGUF_FAMILIES[name]
    folder = family.make(tmp_path / "folder")
    file = open_checkpoint(family.write(folder, tmp_path / "model.gguf", quantization="Q8_0"))
    assert export(file.path, tmp_path / "exported", "float32")["notes"] == []
    written = open_checkpoint(tmp_path / "exported")
    assert written.shapes == file.shapes
    for tensor, shape in file.shapes.items():
        found, expected = torch.empty(shape), torch.empty(shape)
        written.copy_to(tensor, found)
        file.copy_to(tensor, expected)
        assert torch.equal(found, expected), tensor


@pytest.mark.parametrize("name", ["llama", "gemma 3", "gpt neox", "qwen3 moe"])
def test_transformers_reads_what_is_written(tmp_path: Path, name: str) -> None:
    """The folder made from a float32 file gives, in transformers, the logits of the model's own folder."""
    family = GGUF_FAMILIES[name]
    folder = family.make(tmp_path / "folder")
    export(family.write(folder, tmp_path / "model.gguf"), tmp_path / "exported", "float32")
    own, exported = Reference.open(folder), Reference.open(tmp_path / "exported")
    prompt = list(range(3, 40))
    expected = own.logits(prompt)
    bound = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(exported.logits(prompt), expected, rtol=0, atol=bound)


def test_a_folder_with_things_in_it_is_left_alone(tmp_path: Path) -> None:
    """Nothing is written into a folder that holds anything."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").write_text("mine")
    family = GGUF_FAMILIES["llama"]
    path = family.write(family.make(tmp_path / "folder"), tmp_path / "model.gguf")
    with pytest.raises(ModelError, match="there exists: give a new folder"):
        export(path, tmp_path / "there", "float32")
    assert [each.name for each in (tmp_path / "there").iterdir()] == ["notes.txt"]


_SMOLLM2 = locate("smollm2-135m-instruct")


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.skipif(not _SMOLLM2.weights or not _SMOLLM2.weights.is_file(), reason="SmolLM2 was not fetched")
def test_smollm2_says_the_same_from_file_and_folder(tmp_path: Path) -> None:
    """SmolLM2 as GGUF Q4_1 and as the folder exported from it give the same greedy text in float32."""
    assert _SMOLLM2.weights is not None  # skipif
    export(_SMOLLM2.weights, tmp_path / "smollm2", "float32")
    prepare(str(_SMOLLM2.weights), tmp_path / "prepared")
    prepare(str(tmp_path / "smollm2"))
    texts = []
    for name in ("prepared", "smollm2"):
        prepared = open_prepared(str(tmp_path / name))
        tokenizer = Tokenizer.from_file(str(prepared.tokenizer_file))
        model = load_weights(prepared.weights, torch.float32, CPU, build_kernels("cpu"))
        prompt = tokenizer.encode("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
        (tokens,) = PagedLoop(model).generate([prompt.ids], 24, chunk=64)
        texts.append((tokenizer.decode(tokens), prepared.eos_token_ids, prepared.temperature, prepared.chat_template))
    assert texts[0] == texts[1]
    assert "Paris" in texts[0][0]
