"""Reading a Hugging Face folder as a source for `octavo prepare`. Needs transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.models.errors import ModelError
from octavo.models.source import ModelSource
from octavo.models.weight_files import find_weight_files

CONFIG_NAME = "config.json"
_GENERATION_NAME = "generation_config.json"


def read_folder(folder: Path, *, allow_pickle: bool = False) -> ModelSource:
    """Return what a folder with config.json, safetensors and a tokenizer says.

    `allow_pickle`: take PyTorch's files where there is no safetensors file. Raises ModelError where one is missing or
    cannot be read.
    """
    if not (folder / CONFIG_NAME).is_file():
        raise ModelError(f"{folder} holds no {CONFIG_NAME}: give a Hugging Face model folder or a .gguf file")
    config = _read_json(folder / CONFIG_NAME)
    sizes = {name: _size(folder, config, name) for name in ("vocab_size", "max_position_embeddings")}
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
        **sizes,
    )


def _size(folder: Path, config: dict[str, Any], name: str) -> int:
    """Return a size of the model. What the file calls otherwise, has inside another object or leaves out is asked of
    transformers, which knows the names and defaults of every model it has.
    """
    size = config.get(name)
    if size is None:
        from transformers import AutoConfig

        try:
            described = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(
                f"{folder / CONFIG_NAME} lacks {name}, and transformers does not know it: {error}"
            ) from None
        size = getattr(described.get_text_config(), name, None)
    if not isinstance(size, int):
        raise ModelError(f"{folder / CONFIG_NAME} lacks {name}: this is no language model that Octavo knows")
    return size


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
