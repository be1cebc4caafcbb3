"""`octavo prepare`: from a model's own files to the prepared folder that every service reads."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from octavo.models.catalog import recommended_for
from octavo.models.errors import ModelError
from octavo.models.folder_source import read_folder
from octavo.models.folder_tokenizer import read_tokenizer
from octavo.models.gguf_source import read_gguf
from octavo.models.hub import fetch_snapshot
from octavo.models.location import ModelKind, ModelLocation, locate
from octavo.models.manifest import (
    FILE_NAMES,
    GenerationConfig,
    Manifest,
    WeightFile,
    read_manifest,
    revision_of,
    write_files,
)
from octavo.models.source import ModelSource
from octavo.models.tokenizer_fit import fit_tokenizer

_CHUNK = 4 << 20

Reporter = Callable[[str], None]
"""Takes one line for the person who waits."""


def prepare(
    model: str,
    output: Path | None = None,
    *,
    models: Path | None = None,
    report: Reporter = print,
    tokenizer: Path | None = None,
    allow_pickle: bool = False,
) -> Path:
    """Write the prepared folder of `model` and return it.

    `model` is what `octavo.models.location.locate` takes; a hub id is fetched first. `output` replaces the usual place,
    beside the weights; `models` the folder of fetched models. The folder appears whole or not at all, and replaces an
    older one. `tokenizer`: a Hugging Face folder whose tokenizer is taken instead of the model's own. `allow_pickle`:
    take PyTorch's files of a folder that has no safetensors file. Raises ModelError.
    """
    location = locate(model, models)
    if location.kind is ModelKind.HUB:
        assert location.weights is not None  # locate: only a prepared folder has none
        report(f"fetching {location.name} from the Hugging Face hub")
        fetch_snapshot(location.name, location.weights, allow_pickle=allow_pickle)
    weights, name = _weights_and_name(location)
    target = location.prepared if output is None else output.expanduser().absolute()
    _check_target(target)
    report(f"reading {weights}")
    source = fit_tokenizer(read_source(weights, tokenizer, allow_pickle=allow_pickle), report)
    files = _hash_files(source)
    recommended = recommended_for(file.sha256 for file in files)
    generation = source.generation(recommended)
    written = source.tokenizer.encode()
    manifest = Manifest(
        name=name,
        revision=revision_of(files, written, source.chat_template, generation),
        tokenizer_hash=hashlib.sha256(written).hexdigest(),
        weights=os.path.relpath(weights, target),
        weight_files=files,
        recommended=recommended,
        vocab_size=source.vocab_size,
        max_position_embeddings=source.max_position_embeddings,
    )
    _write(target, manifest, source, generation)
    report(f"prepared {name} in {target}, revision {manifest.revision[:12]}")
    return target


def _weights_and_name(location: ModelLocation) -> tuple[Path, str]:
    if location.kind is ModelKind.PREPARED:
        manifest = read_manifest(location.prepared)
        weights, name = Path(os.path.normpath(location.prepared / manifest.weights)), manifest.name
    else:
        assert location.weights is not None  # locate: only a prepared folder has none
        weights, name = location.weights, location.name
    if not weights.exists():
        if location.kind is ModelKind.CATALOG:
            raise ModelError(f"{location.name} has not been fetched: run `octavo pull {location.name}`")
        raise ModelError(f"{weights} is missing")
    return weights, name


def _check_target(target: Path) -> None:
    """Refuse to replace anything that is more than an older prepared folder, whole or not."""
    if target.exists() and not (target.is_dir() and {path.name for path in target.iterdir()} <= FILE_NAMES):
        raise ModelError(f"{target} exists and is no prepared folder: give another --output")


def read_source(weights: Path, tokenizer: Path | None = None, *, allow_pickle: bool = False) -> ModelSource:
    """Return what a GGUF file or a Hugging Face folder says, with the tokenizer of another folder where one is given.

    Raises ModelError.
    """
    if tokenizer is None:
        return read_gguf(weights) if weights.is_file() else read_folder(weights, allow_pickle=allow_pickle)
    other = read_tokenizer(tokenizer)
    if weights.is_dir():
        return read_folder(weights, allow_pickle=allow_pickle, tokenizer=other)
    return read_gguf(weights, tokenizer=other.text)


def _hash_files(source: ModelSource) -> tuple[WeightFile, ...]:
    sizes = {path: path.stat().st_size for path in source.files}
    found = []
    with tqdm(total=sum(sizes.values()), desc="hashing", unit="B", unit_scale=True, disable=None, leave=False) as bar:
        for path, size in sizes.items():
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
                    bar.update(len(chunk))
            found.append(WeightFile(path.name, size, digest.hexdigest()))
    return tuple(found)


def _write(target: Path, manifest: Manifest, source: ModelSource, generation: GenerationConfig) -> None:
    """Put the new folder in place of the old in two renames: a crash leaves the old, the new or none, never half."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
            fresh = Path(scratch) / "new"
            fresh.mkdir()
            write_files(fresh, manifest, source.tokenizer.encode(), source.chat_template, generation)
            if target.exists():
                target.rename(Path(scratch) / "old")
            fresh.rename(target)
    except OSError as error:
        shown = error.filename or target
        raise ModelError(f"cannot write {shown}: {error.strerror}; give a writable folder with --output") from None
