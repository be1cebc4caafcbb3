"""Reading a Hugging Face folder as a source for `octavo prepare`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.models.errors import ModelError
from octavo.models.folder_tokenizer import FolderTokenizer, read_tokenizer
from octavo.models.json_file import read_object, read_object_if_there
from octavo.models.servable import why_not_served
from octavo.models.source import ModelSource
from octavo.models.weight_files import find_weight_files

CONFIG_NAME = "config.json"
_GENERATION_NAME = "generation_config.json"


def read_folder(folder: Path, *, allow_pickle: bool = False, tokenizer: FolderTokenizer | None = None) -> ModelSource:
    """Return what a folder with config.json, safetensors and a tokenizer says.

    `allow_pickle`: take PyTorch's files where there is no safetensors file. `tokenizer`: taken instead of the folder's
    own, with its template. Raises ModelError where one is missing, cannot be read, or says that it cannot be served.
    """
    config = read_config(folder)
    if (reason := why_not_served(folder, config)) is not None:
        raise ModelError(f"{folder / CONFIG_NAME}: {reason}")
    sizes = {name: _size(folder, config, name) for name in ("vocab_size", "max_position_embeddings")}
    files = (folder / CONFIG_NAME, *find_weight_files(folder, allow_pickle=allow_pickle).paths)
    tokenizer = tokenizer or read_tokenizer(folder)
    defaults = read_object_if_there(folder / _GENERATION_NAME)
    eos = defaults.get("eos_token_id")
    eos = _as_list(config.get("eos_token_id") if eos is None else eos)
    bos = tokenizer.bos_token_id
    return ModelSource(
        files=files,
        tokenizer=tokenizer.text,
        chat_template=tokenizer.chat_template,
        defaults=defaults,
        eos_token_ids=(*eos, tokenizer.eos_token_id),
        bos_token_id=bos if bos is not None else next(iter(_as_list(config.get("bos_token_id"))), None),
        **sizes,
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json. Raises ModelError where it is missing or cannot be read."""
    if not (folder / CONFIG_NAME).is_file():
        others = sorted(path.name for path in folder.glob("*.gguf"))
        what = f"the file itself, {others[0]}" if others else "a Hugging Face model folder or a .gguf file"
        raise ModelError(f"{folder} holds no {CONFIG_NAME}: give {what}")
    return read_object(folder / CONFIG_NAME)


def _size(folder: Path, config: dict[str, Any], name: str) -> int:
    """Return a size of the model. What the file calls otherwise, has inside another object or leaves out is asked of
    transformers, which knows the names and defaults of every model it has.
    """
    size = config.get(name)
    if size is None:
        from transformers import AutoConfig

        try:
            described = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers raises whatever an odd field led it to
            raise ModelError(
                f"{folder / CONFIG_NAME} lacks {name}, and transformers does not know it: {error}"
            ) from None
        size = getattr(described.get_text_config(), name, None)
    if not isinstance(size, int):
        raise ModelError(
            f"{folder / CONFIG_NAME} lacks {name}: this is no language model that Octavo knows (those that have no "
            "table of positions and turn nothing by them, as with ALiBi or recurrent state, are not supported)"
            if name == "max_position_embeddings"
            else f"{folder / CONFIG_NAME} lacks {name}: this is no language model that Octavo knows"
        )
    return size


def _as_list(ids: Any) -> list[int]:
    if ids is None:
        return []
    return list(ids) if isinstance(ids, list) else [ids]
