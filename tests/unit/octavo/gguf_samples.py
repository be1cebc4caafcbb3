"""GGUF files with metadata and no tensors, and small vocabularies to put into them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf import GGUFWriter
from tokenizers import pre_tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def write_gguf(path: Path, metadata: Mapping[str, Any], architecture: str = "llama") -> Path:
    """Write `metadata` as a GGUF file: int as uint32, float as float32, lists as arrays. Return the path."""
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_metadata(
    pre: str | None = "smollm",
    *,
    merges: tuple[str, ...] = ("Ġ Ġ", "Ġ t", "h e", "Ġt he", "Ġ 1", "1 2", "12 3", "a b", "' s"),
    extra_tokens: tuple[tuple[str, int], ...] = (),
    **changes: Any,
) -> dict[str, Any]:
    """Return metadata of a byte-level BPE model: three specials, 256 bytes, what `merges` join, `extra_tokens`."""
    specials = [("<|endoftext|>", CONTROL), ("<|im_start|>", CONTROL), ("<|im_end|>", CONTROL)]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges)]
    tokens = [*specials, *((piece, NORMAL) for piece in pieces), *extra_tokens]
    metadata = {
        "llama.context_length": 256,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [token for token, _ in tokens],
        "tokenizer.ggml.token_type": [kind for _, kind in tokens],
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return {key: value for key, value in (metadata | changes).items() if value is not None}


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """Return metadata of a SentencePiece model: <unk> <s> </s>, the 256 bytes, letters, and a few scored pieces."""
    pieces = ["▁the", "▁t", "he", "▁th", "in", "ing", "▁a", "an", "▁an", "th", "the"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz"]
    tokens = [
        ("<unk>", UNKNOWN, 0.0),
        ("<s>", CONTROL, 0.0),
        ("</s>", CONTROL, 0.0),
        *((f"<0x{byte:02X}>", BYTE, 0.0) for byte in range(256)),
        *((piece, NORMAL, -float(index)) for index, piece in enumerate(pieces)),
        *((letter, NORMAL, -100.0 - index) for index, letter in enumerate(letters)),
    ]
    metadata = {
        "llama.context_length": 256,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [token for token, _, _ in tokens],
        "tokenizer.ggml.token_type": [kind for _, kind, _ in tokens],
        "tokenizer.ggml.scores": [score for _, _, score in tokens],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return {key: value for key, value in (metadata | changes).items() if value is not None}
