"""Building tokenizer.json from the metadata of a GGUF file.

Two kinds of vocabulary exist among the models served: byte-level BPE (`tokenizer.ggml.model` is "gpt2": Llama 3,
SmolLM, Qwen, Mistral Nemo) and SentencePiece BPE ("llama": Llama 2, Mistral, TinyLlama). Everything that the file says
of its tokenizer is kept: how digits and words are cut, which tokens are special, which are added at the start and end.
"""

from __future__ import annotations

import json
from typing import Any

from octavo.models.errors import ModelError
from octavo.models.pre_tokenizers import PRE_TOKENIZERS

_NORMAL, _UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
_SPACE = "▁"
_PHI3_KEEPS_SPACE = frozenset({"<unk>", "<s>", "<|endoftext|>"})
_OTHER_TOKENIZER = (
    "take the tokenizer of the model's Hugging Face folder, by `octavo prepare --tokenizer FOLDER`, or that folder"
)


def tokenizer_json(metadata: dict[str, Any]) -> str:
    """Return tokenizer.json for the vocabulary in `metadata`. Raises ModelError where Octavo does not know its kind."""
    kind = metadata.get("tokenizer.ggml.model")
    check_vocabulary(metadata)
    if not isinstance(kind, str) or kind not in _BUILDERS:
        raise ModelError(
            f"the file's tokenizer {kind!r} is of a kind that Octavo does not know ({', '.join(_BUILDERS)}): "
            f"{_OTHER_TOKENIZER}"
        )
    document = {"version": "1.0", "truncation": None, "padding": None} | _BUILDERS[kind](metadata)
    document["added_tokens"] = _added_tokens(metadata)
    document["post_processor"] = _post_processor(metadata)
    return json.dumps(document, ensure_ascii=False)


def check_vocabulary(metadata: dict[str, Any]) -> None:
    """Raise ModelError where the vocabulary is missing, or its lists are not as long as one another or of other kinds
    than they should be, or a special token's id is none of it.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ModelError("the metadata lacks tokenizer.ggml.tokens: the file carries no vocabulary, or is damaged")
    for key, kinds in (("token_type", (int,)), ("scores", (int, float))):
        values = metadata.get(f"tokenizer.ggml.{key}")
        is_list = isinstance(values, list) and all(isinstance(value, kinds) for value in values)
        if values and (not is_list or len(values) != len(tokens)):
            raise ModelError(f"tokenizer.ggml.{key} is no list of {len(tokens)} numbers: the file is damaged")
    merges = metadata.get("tokenizer.ggml.merges", [])
    if not isinstance(merges, list) or not all(isinstance(merge, str) and " " in merge for merge in merges):
        raise ModelError("tokenizer.ggml.merges is no list of pairs: the file is damaged")
    for name in ("bos", "eos", "eot", "eom"):
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None and not (type(value) is int and 0 <= value < len(tokens)):
            raise ModelError(
                f"tokenizer.ggml.{name}_token_id is {value!r}, which is no token of the vocabulary of {len(tokens)}"
            )


def special_token_id(metadata: dict[str, Any], name: str) -> int | None:
    """Return the id of a special token by its short name in the metadata ("bos", "eos", "eot", ...), or None.

    SentencePiece files may leave out the three that are always the same.
    """
    fixed = {"unknown": 0, "bos": 1, "eos": 2} if metadata.get("tokenizer.ggml.model") == "llama" else {}
    token_id: int | None = metadata.get(f"tokenizer.ggml.{name}_token_id", fixed.get(name))
    if type(token_id) is not int or not 0 <= token_id < len(metadata["tokenizer.ggml.tokens"]):
        return None
    return token_id


def _byte_level(metadata: dict[str, Any]) -> dict[str, Any]:
    pre = _pre_tokenizer(metadata)
    add_prefix_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", False))
    # A merge is "left right"; neither side holds a space, which the byte alphabet writes otherwise.
    merges = [merge.split(" ", 1) for merge in metadata.get("tokenizer.ggml.merges", ())]
    return {
        "normalizer": {"type": "NFC"} if pre.normalize else None,
        "pre_tokenizer": pre.to_json(add_prefix_space),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(metadata, merges, ignore_merges=pre.ignore_merges),
    }


def _sentencepiece(metadata: dict[str, Any]) -> dict[str, Any]:
    add_prefix_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    unknown = special_token_id(metadata, "unknown")
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if add_prefix_space:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    # Every stretch of text gets its space in front, also after a special token and before another space: so does
    # SentencePiece. (transformers' conversion gives one to the first stretch only, unless it starts with a space.)
    spaces: list[dict[str, Any]] = [{"type": "Prepend", "prepend": _SPACE}] if add_prefix_space else []
    spaces.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    return {
        "normalizer": {"type": "Sequence", "normalizers": spaces},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": _bpe(
            metadata,
            _merges_by_score(metadata),
            unk_token=None if unknown is None else metadata["tokenizer.ggml.tokens"][unknown],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _bpe(metadata: dict[str, Any], merges: list[list[str]], **settings: Any) -> dict[str, Any]:
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    return model | settings | {"vocab": vocabulary, "merges": merges}


def _merges_by_score(metadata: dict[str, Any]) -> list[list[str]]:
    """Return the merges that SentencePiece's scores imply: it joins the pair whose whole has the highest score.

    Only ordinary pieces take part: the scores of special tokens mean nothing.
    """
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    scores: list[float] = metadata.get("tokenizer.ggml.scores") or [-float(index) for index in range(len(tokens))]
    rank = {
        token: (-score, index)
        for index, (token, score, kind) in enumerate(zip(tokens, scores, _token_types(metadata), strict=True))
        if kind == _NORMAL
    }
    ranked = [
        (*rank[whole], len(whole) - cut, [whole[:cut], whole[cut:]])
        for whole in rank
        for cut in range(1, len(whole))
        if whole[:cut] in rank and whole[cut:] in rank
    ]
    return [pair for *_, pair in sorted(ranked)]


def _added_tokens(metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tokens that are found in the text before anything is cut; all but user-defined ones are special."""
    kinds = _token_types(metadata)
    # Phi-3 was trained without the line ends that its template has behind the marks of turns.
    strips = metadata.get("general.architecture") == "phi3" and metadata.get("tokenizer.ggml.model") == "llama"
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": strips and token not in _PHI3_KEEPS_SPACE,
            "normalized": False,
            "special": kinds[index] != USER_DEFINED,
        }
        for index, token in enumerate(metadata["tokenizer.ggml.tokens"])
        if kinds[index] in (_UNKNOWN, CONTROL, USER_DEFINED) and token
    ]


def _post_processor(metadata: dict[str, Any]) -> dict[str, Any] | None:
    """Return what puts BOS before and EOS after a text, where the file, or else its kind, says so."""
    is_byte_level = metadata["tokenizer.ggml.model"] == "gpt2"
    add_bos_default = _pre_tokenizer(metadata).add_bos if is_byte_level else True
    bos = special_token_id(metadata, "bos") if metadata.get("tokenizer.ggml.add_bos_token", add_bos_default) else None
    eos = special_token_id(metadata, "eos") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if bos is None and eos is None:
        return None
    tokens = metadata["tokenizer.ggml.tokens"]

    def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
        middle = [{"Sequence": {"id": sequence, "type_id": type_id}}]
        before = [] if bos is None else [{"SpecialToken": {"id": tokens[bos], "type_id": type_id}}]
        after = [] if eos is None else [{"SpecialToken": {"id": tokens[eos], "type_id": type_id}}]
        return before + middle + after

    used = {tokens[index]: index for index in (bos, eos) if index is not None}
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {text: {"id": text, "ids": [index], "tokens": [text]} for text, index in used.items()},
    }


def _pre_tokenizer(metadata: dict[str, Any]) -> Any:
    name = metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise ModelError(
            f"the file cuts text by rules named {name!r} (tokenizer.ggml.pre), which Octavo does not know "
            f"({', '.join(PRE_TOKENIZERS)}): {_OTHER_TOKENIZER}"
        )
    return PRE_TOKENIZERS[name]


def _token_types(metadata: dict[str, Any]) -> list[int]:
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or []
    return types if types else [_NORMAL] * len(metadata["tokenizer.ggml.tokens"])
