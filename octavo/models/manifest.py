"""The format of a prepared folder: what `octavo prepare` writes and every service reads.

manifest.json            what the model is, its hashes, and which weight files belong to it
tokenizer.json           the tokenizer, whole, in the format of the `tokenizers` library
chat_template.jinja      the chat template; absent where the model has none
generation_config.json   default sampling and the tokens that end an output
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.models.catalog import recommended_for
from octavo.models.errors import ModelError
from octavo.models.location import MANIFEST_NAME

FORMAT = 1
TOKENIZER_NAME = "tokenizer.json"
CHAT_TEMPLATE_NAME = "chat_template.jinja"
GENERATION_CONFIG_NAME = "generation_config.json"
FILE_NAMES = frozenset({MANIFEST_NAME, TOKENIZER_NAME, CHAT_TEMPLATE_NAME, GENERATION_CONFIG_NAME})
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class WeightFile:
    """One file of the model: name relative to the weights folder, size in bytes, sha256 as lower-case hex."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """manifest.json. `weights` is the GGUF file or the Hugging Face folder, relative to the prepared folder.

    `recommended` are the catalog's sampling defaults that the generation config was made with, by its names.
    """

    name: str
    revision: str
    tokenizer_hash: str
    weights: str
    weight_files: tuple[WeightFile, ...]
    vocab_size: int
    max_position_embeddings: int
    recommended: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_current(self) -> bool:
        """Whether preparing the same files today would give the same defaults."""
        return self.recommended == recommended_for(file.sha256 for file in self.weight_files)


@dataclass(frozen=True)
class GenerationConfig:
    """generation_config.json: every default is resolved. Meaning and ranges as in octavo.v1.SamplingConfig."""

    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def revision_of(
    weight_files: tuple[WeightFile, ...], tokenizer: bytes, chat_template: str | None, generation: GenerationConfig
) -> str:
    """Return the model revision: sha256 over everything that decides what the model says, as lower-case hex.

    Parts are tagged and hashed one by one, so that no two lists of parts run together. File names do not count: the
    same file under another name is the same model.
    """
    return revision_from(weight_files, hashlib.sha256(tokenizer).hexdigest(), chat_template, generation)


def revision_from(
    weight_files: tuple[WeightFile, ...], tokenizer_hash: str, chat_template: str | None, generation: GenerationConfig
) -> str:
    """Return the model revision where the tokenizer has been hashed already."""
    template = b"absent" if chat_template is None else b"present" + chat_template.encode()
    parts = [("weights", _digest(digest.encode())) for digest in sorted(file.sha256 for file in weight_files)]
    parts.append(("tokenizer", bytes.fromhex(tokenizer_hash)))
    parts.append(("chat_template", _digest(template)))
    parts.append(("generation_config", _digest(_generation_text(generation).encode())))
    whole = hashlib.sha256()
    for tag, digest in parts:
        whole.update(f"{tag}\0".encode())
        whole.update(digest)
    return whole.hexdigest()


def write_files(
    folder: Path, manifest: Manifest, tokenizer: bytes, chat_template: str | None, generation: GenerationConfig
) -> None:
    """Write the files of a prepared folder into `folder`, the manifest last."""
    (folder / TOKENIZER_NAME).write_bytes(tokenizer)
    if chat_template is not None:
        (folder / CHAT_TEMPLATE_NAME).write_text(chat_template, encoding="utf-8", newline="")
    (folder / GENERATION_CONFIG_NAME).write_text(_generation_text(generation), encoding="utf-8")
    document = {"format": FORMAT, **dataclasses.asdict(manifest)}
    (folder / MANIFEST_NAME).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a prepared folder. Raises ModelError where it is damaged or of another format."""
    path = folder / MANIFEST_NAME
    document = _read_json(path)
    if document.get("format") != FORMAT:
        raise ModelError(f"{path} has format {document.get('format')!r}, this Octavo reads {FORMAT}: {_again(folder)}")
    try:
        files = tuple(WeightFile(str(f["name"]), int(f["size"]), str(f["sha256"])) for f in document["weight_files"])
        manifest = Manifest(
            name=str(document["name"]),
            revision=str(document["revision"]),
            tokenizer_hash=str(document["tokenizer_hash"]),
            weights=str(document["weights"]),
            weight_files=files,
            vocab_size=int(document["vocab_size"]),
            max_position_embeddings=int(document["max_position_embeddings"]),
            recommended={str(name): float(value) for name, value in document.get("recommended", {}).items()},
        )
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"{path} is damaged ({error!r}): {_again(folder)}") from None
    if not all(_SHA256.fullmatch(digest) for digest in (manifest.revision, manifest.tokenizer_hash)):
        raise ModelError(f"{path} is damaged (a hash is no sha256): {_again(folder)}")
    return manifest


def read_generation_config(folder: Path) -> GenerationConfig:
    """Return the generation config of a prepared folder. Raises ModelError where it is damaged."""
    path = folder / GENERATION_CONFIG_NAME
    document = _read_json(path)
    try:
        return GenerationConfig(
            eos_token_ids=tuple(int(token) for token in document["eos_token_id"]),
            bos_token_id=None if document["bos_token_id"] is None else int(document["bos_token_id"]),
            temperature=float(document["temperature"]),
            top_p=float(document["top_p"]),
            top_k=int(document["top_k"]),
            min_p=float(document["min_p"]),
            repetition_penalty=float(document["repetition_penalty"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"{path} is damaged ({error!r}): {_again(folder)}") from None


def read_chat_template(folder: Path) -> str | None:
    """Return the chat template of a prepared folder, or None where the model has none. Raises ModelError."""
    path = folder / CHAT_TEMPLATE_NAME
    if not path.exists():
        return None
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path} ({error}): {_again(folder)}") from None


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file of a prepared folder as lower-case hex. Raises ModelError."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"cannot read {path} ({error}): {_again(path.parent)}") from None


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _generation_text(generation: GenerationConfig) -> str:
    document = dataclasses.asdict(generation)
    document["eos_token_id"] = list(document.pop("eos_token_ids"))
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path} ({error}): {_again(path.parent)}") from None
    if not isinstance(document, dict):
        raise ModelError(f"{path} is damaged (no JSON object): {_again(path.parent)}")
    return document


def _again(folder: Path) -> str:
    return f"run `octavo prepare` on the model again (prepared folder: {folder})"
