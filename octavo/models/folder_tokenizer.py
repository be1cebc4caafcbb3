"""The tokenizer of a Hugging Face folder, from the files that it may lie in.

tokenizer.json is taken as it is. transformers takes of it the vocabulary alone where tokenizer_config.json names a
class that it has code for, and cuts text by the rules of that class: GPT-2's, say, for SmolLM 2, whose own file cuts
digits one by one. Code that comes with a model is never run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.models.errors import ModelError
from octavo.models.gguf_tokenizer import USER_DEFINED, tokenizer_json
from octavo.models.json_file import read_object, read_object_if_there
from octavo.models.sentencepiece_file import read_sentencepiece

_SETTINGS_NAME = "tokenizer_config.json"
_OTHER_STEMS, _OTHER_SUFFIXES = ("vocab", "merges", "tekken"), (".model", ".tiktoken", ".bpe", ".vocab")
"""Of files that transformers' classes read."""
_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
"""Of an added token, and what they are where a file leaves them out."""


@dataclass(frozen=True)
class FolderTokenizer:
    """`text` is tokenizer.json. The ids are those of the tokens that the folder names, None where it names none."""

    text: str
    chat_template: str | None
    bos_token_id: int | None
    eos_token_id: int | None


def read_tokenizer(folder: Path) -> FolderTokenizer:
    """Read a folder's tokenizer. Raises ModelError where there is none, or none that can be read."""
    settings = _settings(folder)
    if (folder / "tokenizer.json").is_file():
        path = folder / "tokenizer.json"
        document = read_object(path)
    elif (folder / "tokenizer.model").is_file():
        path = folder / "tokenizer.model"
        document = _from_sentencepiece(path, settings)
    else:
        return _by_transformers(folder)
    _add_tokens(document, settings, path)
    return _described(_load(path, document), folder, settings)


def _described(tokenizer: Any, folder: Path, settings: Mapping[str, Any]) -> FolderTokenizer:
    # Lengths are the scheduler's business: a tokenizer that cuts or pads would do it behind everyone's back.
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def token_id(name: str) -> int | None:
        text = _text(settings.get(name))
        index: int | None = None if text is None else tokenizer.token_to_id(text)
        return index

    if settings.get("add_bos_token") is True and not tokenizer.encode("").ids and token_id("bos_token") is not None:
        _put_before(tokenizer, str(_text(settings["bos_token"])))
    return FolderTokenizer(
        text=tokenizer.to_str(),
        chat_template=_chat_template(folder, settings),
        bos_token_id=token_id("bos_token"),
        eos_token_id=token_id("eos_token"),
    )


def _put_before(tokenizer: Any, token: str) -> None:
    """Let every text begin with a token: some files leave that to the class that their settings name."""
    from tokenizers import processors

    template = processors.TemplateProcessing(
        single=f"{token}:0 $A:0", special_tokens=[(token, tokenizer.token_to_id(token))]
    )
    own = tokenizer.post_processor
    tokenizer.post_processor = template if own is None else processors.Sequence([own, template])


def _settings(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, with what older folders have in files beside it."""
    settings = read_object_if_there(folder / _SETTINGS_NAME)
    for name, value in read_object_if_there(folder / "special_tokens_map.json").items():
        if settings.get(name) is None:
            settings[name] = value
    if not settings.get("added_tokens_decoder"):
        added, special = read_object_if_there(folder / "added_tokens.json"), _special_tokens(settings)
        settings["added_tokens_decoder"] = {
            str(index): {"content": content, "normalized": False, "special": content in special}
            for content, index in added.items()
        }
    return settings


def _special_tokens(settings: Mapping[str, Any]) -> set[str]:
    """Return the texts of the tokens that have a part, such as the end of outputs."""
    named = [value for name, value in settings.items() if name.endswith("_token")]
    others = settings.get("additional_special_tokens")
    texts = [_text(token) for token in (*named, *(others if isinstance(others, list) else ()))]
    return {text for text in texts if text is not None}


def _text(token: Any) -> str | None:
    """Return the text of a token, which may stand alone or with its flags."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the template for plain conversations: a file of its own goes before the settings."""
    path = folder / "chat_template.jinja"
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    template = settings.get("chat_template") or read_object_if_there(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        # A model may name several; "default" is the one for plain conversations.
        template = {each.get("name"): each.get("template") for each in template if isinstance(each, Mapping)}
    if isinstance(template, Mapping):
        template = template.get("default")
    return template if isinstance(template, str) else None


def _add_tokens(document: dict[str, Any], settings: Mapping[str, Any], path: Path) -> None:
    """Add what the settings say of added tokens: their flags, and tokens that the file does not have yet."""
    try:
        found = {token["id"]: token for token in document.get("added_tokens") or []}
        vocabulary = document["model"]["vocab"]
        size = max(len(vocabulary), *(index + 1 for index in found)) if found else len(vocabulary)
        said = sorted((int(index), token) for index, token in (settings.get("added_tokens_decoder") or {}).items())
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ModelError(f"{path} or {_SETTINGS_NAME} beside it is no tokenizer, or is damaged") from None
    for index, token in said:
        if not isinstance(token, Mapping) or not isinstance(token.get("content"), str):
            continue
        flags = {flag: bool(token.get(flag, default)) for flag, default in _FLAGS.items()}
        if index in found:
            if found[index].get("content") == token["content"]:
                found[index] = {**found[index], **flags}
        elif index == size or (index < size and _is_piece(vocabulary, token["content"], index)):
            # Ids past a gap could not be given: the library counts on.
            found[index] = {"id": index, "content": token["content"], **flags}
            size = max(size, index + 1)
    document["added_tokens"] = [found[index] for index in sorted(found)]


def _is_piece(vocabulary: Any, content: str, index: int) -> bool:
    return isinstance(vocabulary, Mapping) and vocabulary.get(content) == index


def _from_sentencepiece(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return tokenizer.json for tokenizer.model: GGUF files carry what is in one, in other words."""
    model = read_sentencepiece(path)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(model.pieces),
        "tokenizer.ggml.scores": list(model.scores),
        "tokenizer.ggml.token_type": list(model.types),
        "tokenizer.ggml.add_space_prefix": model.add_dummy_prefix,
        # Those of Llama's and Gemma's classes where the settings are silent.
        "tokenizer.ggml.add_bos_token": settings.get("add_bos_token") is not False,
        "tokenizer.ggml.add_eos_token": settings.get("add_eos_token") is True,
    }
    ids = {"unknown": model.unk_id, "bos": model.bos_id, "eos": model.eos_id}
    # One that is not there stands there as None: left out, it would be the usual one.
    metadata |= {f"tokenizer.ggml.{name}_token_id": index for name, index in ids.items()}
    document: dict[str, Any] = json.loads(tokenizer_json(metadata))
    own = {index for index, kind in enumerate(model.types) if kind == USER_DEFINED}
    if own and model.add_dummy_prefix:
        # Added tokens begin a stretch of text anew, which gets its space in front; to SentencePiece these are pieces of
        # the text like others, but whole.
        document["added_tokens"] = [token for token in document["added_tokens"] if token["id"] not in own]
        texts = sorted((model.pieces[index] for index in own), key=len, reverse=True)
        pattern = {"Regex": "|".join(map(re.escape, texts))}
        document["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        document["model"]["ignore_merges"] = True
    return document


def _load(path: Path, document: Mapping[str, Any]) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(json.dumps(document, ensure_ascii=False))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path} is no tokenizer that loads ({error}): the file is damaged") from None


def _by_transformers(folder: Path) -> FolderTokenizer:
    """Read files of a model's own kind, such as vocab.json and merges.txt, by transformers' classes."""
    if not any(path.stem in _OTHER_STEMS or path.suffix in _OTHER_SUFFIXES for path in folder.glob("*")):
        raise ModelError(
            f"{folder} holds no tokenizer (tokenizer.json, tokenizer.model, or vocab.json with merges.txt): fetch the "
            "model's, or take another folder's by `octavo prepare --tokenizer FOLDER`"
        )
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ModelError(
            f"{folder} holds no tokenizer.json, and other tokenizers are read by transformers: run this where the "
            'executor is installed (`pip install "octavo[executor]"`)'
        ) from None
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever the broken file led it to
        raise ModelError(f"cannot load the tokenizer in {folder}: {error}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(f"{type(tokenizer).__name__} cannot be written as tokenizer.json: the model is not supported")
    names = ("bos_token", "eos_token", "chat_template")
    return _described(backend, folder, {name: getattr(tokenizer, name, None) for name in names})
