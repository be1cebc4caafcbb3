"""Opening a prepared model: the one way for gateway and executor to learn what a model is. Needs no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from octavo.models.errors import ModelError
from octavo.models.location import MANIFEST_NAME, ModelKind, ModelLocation, locate
from octavo.models.manifest import (
    TOKENIZER_NAME,
    Manifest,
    read_chat_template,
    read_generation_config,
    read_manifest,
    revision_from,
    sha256_of,
)


@dataclass(frozen=True)
class PreparedModel:
    """A model as `octavo prepare` left it.

    `revision` is the content hash of weights, tokenizer, template and defaults, `tokenizer_hash` that of
    tokenizer.json; both sha256 as lower-case hex. `path` is the prepared folder. `weights` is the GGUF file or the
    Hugging Face folder; it may be missing where only a gateway runs (see `check_weights`). Valid token ids are below
    `vocab_size`. Sampling defaults are resolved, in the ranges of octavo.v1.SamplingConfig. `is_pickled`: the weights
    are PyTorch's files, which whoever prepared the model asked for.
    """

    name: str
    revision: str
    tokenizer_hash: str
    path: Path
    weights: Path
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    tokenizer_file: Path
    chat_template: str | None
    is_pickled: bool = False

    def check_weights(self) -> None:
        """Raise ModelError where a weight file is missing or is not the one that was prepared (by size)."""
        manifest = read_manifest(self.path)
        for file, path in weight_paths(manifest, self.weights).items():
            if not path.is_file():
                raise ModelError(f"{path} is missing: it belongs to the model prepared in {self.path}")
            _check_size(path, manifest.weight_files[file].size)


def open_prepared(model: str) -> PreparedModel:
    """Open what `octavo prepare` wrote for a catalog name, GGUF file, Hugging Face folder, prepared folder or hub id.

    Weight files that lie there must have the size they had when prepared; that none is missing is for `check_weights`.
    Raises ModelError, naming the command to run.
    """
    location = locate(model)
    folder = location.prepared
    if not (folder / MANIFEST_NAME).is_file():
        raise ModelError(f"model {model!r} is not prepared: run `{command_for(location)}`")
    manifest = read_manifest(folder)
    weights = Path(os.path.normpath(folder / manifest.weights))
    for file, path in weight_paths(manifest, weights).items():
        if path.is_file():
            _check_size(path, manifest.weight_files[file].size)
    tokenizer_file = folder / TOKENIZER_NAME
    if not tokenizer_file.is_file() or sha256_of(tokenizer_file) != manifest.tokenizer_hash:
        raise ModelError(f"{tokenizer_file} is not the file that was prepared: run `{command_for(location)}`")
    generation, chat_template = read_generation_config(folder), read_chat_template(folder)
    revision = revision_from(manifest.weight_files, manifest.tokenizer_hash, chat_template, generation)
    if revision != manifest.revision:
        # Of a template that a full disk cut short half may still be a template.
        raise ModelError(f"{folder} does not hold what was prepared in it: run `{command_for(location)}`")
    return PreparedModel(
        name=manifest.name,
        revision=manifest.revision,
        tokenizer_hash=manifest.tokenizer_hash,
        path=folder,
        weights=weights,
        vocab_size=manifest.vocab_size,
        max_position_embeddings=manifest.max_position_embeddings,
        eos_token_ids=generation.eos_token_ids,
        bos_token_id=generation.bos_token_id,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        min_p=generation.min_p,
        repetition_penalty=generation.repetition_penalty,
        tokenizer_file=tokenizer_file,
        chat_template=chat_template,
        is_pickled=any(file.name.endswith(".bin") for file in manifest.weight_files),
    )


def command_for(location: ModelLocation) -> str:
    """Return the command that fetches and prepares the model at `location`."""
    return f"octavo {'pull' if location.kind is ModelKind.CATALOG else 'prepare'} {location.given}"


def weight_paths(manifest: Manifest, weights: Path) -> dict[int, Path]:
    """Return where each of the manifest's weight files lies, by its index."""
    folder = weights.parent if weights.suffix.lower() == ".gguf" else weights
    return {index: folder / file.name for index, file in enumerate(manifest.weight_files)}


def _check_size(path: Path, size: int) -> None:
    found = path.stat().st_size
    if found != size:
        raise ModelError(
            f"{path} has {found} bytes but had {size} when it was prepared: run `octavo prepare` on the model again"
        )
