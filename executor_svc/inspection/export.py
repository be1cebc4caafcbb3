"""Writing a model as a Hugging Face folder: weights unpacked, in the names and words of that format."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from executor_svc.weights import Checkpoint, open_checkpoint
from octavo.models.catalog import CATALOG, recommended_for
from octavo.models.errors import ModelError
from octavo.models.manifest import sha256_of
from octavo.models.prepare import read_source
from octavo.models.source import ModelSource
from octavo.models.tokenizer_fit import fit_tokenizer

DTYPES = {"float32": ("F32", torch.float32), "bfloat16": ("BF16", torch.bfloat16), "float16": ("F16", torch.float16)}
"""By the names of --dtype: what safetensors calls it, and torch."""
_COPY_BYTES = 64 << 20


def export(weights: Path, folder: Path, dtype: str) -> dict[str, Any]:
    """Write the model at `weights` (a GGUF file or Hugging Face folder) into `folder`, which must be new or empty.

    The folder appears whole or not at all; a few tensors are in memory at a time. Raises ModelError, ModelLoadError.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} exists: give a new folder")
    checkpoint = open_checkpoint(weights)
    for refusal in checkpoint.unreadable.values():
        raise ModelError(refusal)
    notes: list[str] = []
    source = fit_tokenizer(read_source(weights), notes.append)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
            fresh = Path(scratch) / "new"
            fresh.mkdir()
            _write_words(fresh, checkpoint, source, dtype)
            with (fresh / "model.safetensors").open("wb") as file:
                _write_tensors(file, checkpoint, dtype)
            if folder.exists():
                folder.rmdir()
            shutil.move(fresh, folder)
    except OSError as error:
        raise ModelError(f"cannot write {error.filename or folder}: {error.strerror}") from None
    if checkpoint.config.get("rope_parameters", {}).get("rope_type") == "frequency_factors":
        notes.append("its rotary factors follow no rule that transformers knows: Octavo alone reads this config.json")
    return {"folder": str(folder), "tensors": len(checkpoint.shapes), "notes": notes}


def _write_words(folder: Path, checkpoint: Checkpoint, source: ModelSource, dtype: str) -> None:
    from tokenizers import Tokenizer

    ends = sorted({index for index in source.eos_token_ids if index is not None})
    ids = {"bos_token_id": source.bos_token_id, "eos_token_id": ends}
    _write_json(folder / "config.json", {**checkpoint.config, **ids, "dtype": dtype})
    said = {**_recommended(checkpoint.path), **source.defaults}
    known = {key: value for key, value in said.items() if key not in ids}
    _write_json(folder / "generation_config.json", known | ids)
    (folder / "tokenizer.json").write_text(source.tokenizer, encoding="utf-8")
    tokenizer = Tokenizer.from_str(source.tokenizer)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": None if source.bos_token_id is None else tokenizer.id_to_token(source.bos_token_id),
        "eos_token": tokenizer.id_to_token(ends[0]) if ends else None,
    }
    if source.chat_template is not None:
        settings["chat_template"] = source.chat_template
    _write_json(folder / "tokenizer_config.json", settings)


def _recommended(weights: Path) -> Mapping[str, float]:
    """Return the catalog's sampling defaults of a file that it knows."""
    if not any(weights.is_file() and model.size == weights.stat().st_size for model in CATALOG.values()):
        return {}
    return recommended_for([sha256_of(weights)])


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_tensors(file: BinaryIO, checkpoint: Checkpoint, dtype: str) -> None:
    name_of_type, kind = DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in checkpoint.shapes.items():
        end = at + prod(shape) * kind.itemsize
        header[name] = {"dtype": name_of_type, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name, shape in checkpoint.shapes.items():
        tensor = torch.empty(shape, dtype=kind)
        checkpoint.copy_to(name, tensor)
        data = tensor.view(-1).view(torch.uint8).numpy()
        for start in range(0, len(data), _COPY_BYTES):
            file.write(data[start : start + _COPY_BYTES].tobytes())
