"""Reading a GGUF file as a source for `octavo prepare`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.models.errors import ModelError
from octavo.models.gguf_file import read_header, read_metadata
from octavo.models.gguf_parts import find_parts
from octavo.models.gguf_readable import why_not_read
from octavo.models.gguf_tokenizer import CONTROL, USER_DEFINED, check_vocabulary, special_token_id, tokenizer_json
from octavo.models.source import ModelSource

# Tokens that end a turn in the chat formats in use. Files made before `eot_token_id` existed do not name theirs.
_TURN_ENDS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|end_of_text|>",
        "<|END_OF_TURN_TOKEN|>",
        "<end_of_turn>",
        "<end_of_utterance>",
    }
)
_SAMPLING_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def read_gguf(path: Path, *, tokenizer: str | None = None) -> ModelSource:
    """Return what the metadata of a GGUF file says. Raises ModelError where it lacks what serving needs, or is of an
    architecture or of types that are not read.

    `tokenizer`: a tokenizer.json to take instead of the one that the file describes.
    """
    metadata = read_metadata(path)
    parts = find_parts(path, metadata)
    for part in parts:
        if (reason := why_not_read(metadata, read_header(part)[1])) is not None:
            raise ModelError(f"{part}: {reason}")
    try:
        return _source(parts, metadata, tokenizer)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def _source(parts: tuple[Path, ...], metadata: dict[str, Any], tokenizer: str | None) -> ModelSource:
    context_key = f"{metadata.get('general.architecture')}.context_length"
    context = metadata.get(context_key)
    if type(context) is not int or context < 1:
        raise ModelError(f"the metadata lacks {context_key}: this is no language model, or the file is damaged")
    check_vocabulary(metadata)
    template = metadata.get("tokenizer.chat_template")
    return ModelSource(
        files=parts,
        tokenizer=tokenizer_json(metadata) if tokenizer is None else tokenizer,
        chat_template=template if isinstance(template, str) else None,
        defaults={name: metadata[key] for name, key in _SAMPLING_KEYS.items() if key in metadata},
        eos_token_ids=_eos_token_ids(metadata),
        bos_token_id=special_token_id(metadata, "bos"),
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        max_position_embeddings=context,
    )


def _eos_token_ids(metadata: dict[str, Any]) -> tuple[int | None, ...]:
    """Return every token that ends an output: those named, and the ends of turns that old files do not name."""
    named = (special_token_id(metadata, name) for name in ("eos", "eot", "eom"))
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    known = (
        index for index, kind in enumerate(kinds) if kind in (CONTROL, USER_DEFINED) and tokens[index] in _TURN_ENDS
    )
    return (*named, *known)
