"""Reading a Hugging Face folder as a source for `octavo prepare`. Needs transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.models.errors import ModelError
from octavo.models.source import ModelSource
from octavo.models.weight_files import find_weight_files

CONFIG_NAME = "config.json"
_SIZE_KEYS = ("vocab_size", "max_position_embeddings")
_GENERATION_NAME = "generation_config.json"


def read_folder(folder: Path, *, allow_pickle: bool = False) -> ModelSource:
    """Return what a folder with config.json, safetensors and a tokenizer says.

    `allow_pickle`: take PyTorch's files where there is no safetensors file. Raises ModelError where one is missing or
    cannot be read.
    """
    if not (folder / CONFIG_NAME).is_file():
        raise ModelError(f"{folder} holds no {CONFIG_NAME}: give a Hugging Face model folder or a .gguf file")
    config = _read_json(folder / CONFIG_NAME)
    vocab_size, max_position_embeddings = _sizes(folder, config)
    files = (folder / CONFIG_NAME, *find_weight_files(folder, allow_pickle=allow_pickle).paths)
    tokenizer = load_tokenizer(folder)
    has_defaults = (folder / _GENERATION_NAME).is_file()
    defaults = _read_json(folder / _GENERATION_NAME) if has_defaults else {}
    eos = _as_list(defaults.get("eos_token_id", config.get("eos_token_id")))
    bos = tokenizer.bos_token_id
    template = tokenizer.chat_template
    return ModelSource(
        files=files,
        tokenizer=serialized(tokenizer),
        # A model may name several templates; "default" is the one for plain conversations.
        chat_template=template.get("default") if isinstance(template, dict) else template,
        defaults=defaults,
        eos_token_ids=(*eos, tokenizer.eos_token_id),
        bos_token_id=bos if bos is not None else next(iter(_as_list(config.get("bos_token_id"))), None),
        vocab_size=vocab_size,
        max_position_embeddings=max_position_embeddings,
    )


def _sizes(folder: Path, config: dict[str, Any]) -> tuple[int, int]:
    """Return vocabulary and context. Families call them differently, or leave to their class what is usual."""
    found = [config.get(key) for key in _SIZE_KEYS]
    if not all(type(size) is int for size in found):
        try:
            from transformers import AutoConfig

            text = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
        except Exception as error:  # transformers raises whatever the file led it to
            raise ModelError(
                f"{folder / CONFIG_NAME} lacks {' or '.join(_SIZE_KEYS)}: this is no language model that Octavo knows "
                f"({(str(error).splitlines() or [type(error).__name__])[0]})"
            ) from None
        found = [getattr(text, key, None) for key in _SIZE_KEYS]
    for key, size in zip(_SIZE_KEYS, found, strict=True):
        if type(size) is not int or size < 1:
            raise ModelError(f"{folder / CONFIG_NAME} lacks {key}: this is no language model that Octavo knows")
    return found[0], found[1]


def load_tokenizer(folder: Path) -> Any:
    """Return transformers' tokenizer of a folder. Raises ModelError."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ModelError(
            "preparing a Hugging Face folder needs transformers: run this where the executor is installed "
            '(`pip install "octavo[executor]"`)'
        ) from None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises whatever the broken file led it to
        raise ModelError(f"cannot load the tokenizer in {folder}: {error}") from error


def serialized(tokenizer: Any) -> str:
    """Return tokenizer.json. Raises ModelError where the tokenizer cannot be written so."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(f"{type(tokenizer).__name__} cannot be written as tokenizer.json: the model is not supported")
    # Lengths are the scheduler's business: a tokenizer that cuts or pads would do it behind everyone's back.
    backend.no_truncation()
    backend.no_padding()
    text: str = backend.to_str()
    return text


def _as_list(ids: Any) -> list[int]:
    if ids is None:
        return []
    return list(ids) if isinstance(ids, list) else [ids]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    if not isinstance(document, dict):
        raise ModelError(f"{path} holds no JSON object")
    return document
