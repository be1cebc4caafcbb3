"""Building tokenizer.json from GGUF metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf_samples import CONTROL, USER_DEFINED, byte_level_metadata, sentencepiece_metadata, write_gguf
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from octavo.models import ModelError
from octavo.models.gguf_tokenizer import tokenizer_json
from octavo.models.pre_tokenizers import PRE_TOKENIZERS


def build(metadata: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer for some metadata."""
    return Tokenizer.from_str(tokenizer_json(metadata))


def tokens_of(metadata: dict[str, Any], text: str) -> list[str]:
    """Return the tokens of a text as strings, without what is added around it."""
    tokens: list[str] = build(metadata).encode(text, add_special_tokens=False).tokens
    return tokens


@pytest.mark.parametrize(
    ("pre", "text", "tokens"),
    [
        ("smollm", "123", ["1", "2", "3"]),
        ("gpt-2", "123", ["123"]),
        ("qwen2", "123", ["1", "2", "3"]),
        ("llama-bpe", "1231", ["123", "1"]),
        ("tekken", "123", ["1", "2", "3"]),
        ("smollm", "  1", ["ĠĠ", "1"]),
        ("gpt-2", "  1", ["Ġ", "Ġ1"]),
        ("gpt-2", "   the", ["ĠĠ", "Ġthe"]),
        ("smollm", "   the", ["ĠĠ", "Ġthe"]),
        ("gpt-2", "x'S", ["x", "'", "S"]),
        ("smollm", "x's", ["x", "'s"]),
        ("llama-bpe", "he12", ["he", "12"]),
        ("smollm", "²½", ["Â", "²", "Â", "½"]),
        ("gpt-4o", "1231", ["123", "1"]),
        ("gpt-4o", "the's", ["t", "he", "'s"]),
        ("dbrx", "1231", ["123", "1"]),
        ("stablelm2", "12", ["1", "2"]),
        ("seed-coder", "12", ["1", "2"]),
        ("deepseek-coder", "12 the", ["1", "2", "Ġthe"]),
        ("olmo", "123", ["123"]),
    ],
)
def test_digits_spaces_and_contractions_are_cut_as_the_file_names_it(pre: str, text: str, tokens: list[str]) -> None:
    """`tokenizer.ggml.pre` decides: SmolLM cuts out each digit, and leaves the spaces before it to themselves."""
    assert tokens_of(byte_level_metadata(pre), text) == tokens


def test_a_whole_piece_that_is_a_token_needs_no_merges_where_the_family_says_so() -> None:
    """Llama 3 takes a piece that is a token as it is, though no merges lead to it; GPT-2 does not."""
    extra = (("abhe", 1),)
    assert tokens_of(byte_level_metadata("llama-bpe", extra_tokens=extra), "abhe") == ["abhe"]
    assert tokens_of(byte_level_metadata("gpt-2", extra_tokens=extra), "abhe") == ["ab", "he"]


def test_qwen_composes_unicode_and_others_leave_it() -> None:
    """NFC is part of Qwen2's and GPT-NeoX's tokenizers: a letter and its accent become one character."""
    decomposed = "e\u0301"
    assert tokens_of(byte_level_metadata("qwen2"), decomposed) == ["Ã", "©"]
    assert tokens_of(byte_level_metadata("olmo"), decomposed) == ["Ã", "©"]
    assert tokens_of(byte_level_metadata("smollm"), decomposed) == ["e", "Ì", "ģ"]


@pytest.mark.parametrize("pre", ["default", "no-such-rule", None])
def test_unknown_rules_are_an_error_that_says_what_to_use(pre: str | None) -> None:
    """A guessed pre-tokenizer would make the model worse without a word, so it is never guessed."""
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre.*Hugging Face folder"):
        tokenizer_json(byte_level_metadata(pre))


def test_an_unknown_kind_of_vocabulary_is_an_error() -> None:
    """T5's unigram vocabulary, say, cannot be written as BPE."""
    with pytest.raises(ModelError, match="'t5'"):
        tokenizer_json(byte_level_metadata() | {"tokenizer.ggml.model": "t5"})


def test_special_tokens_are_found_whole_even_outside_the_byte_alphabet() -> None:
    """Control and user-defined tokens keep their ids in text; only control tokens are left out of decoded text."""
    fullwidth = "<\uff5cUser\uff5c>"
    extra = ((fullwidth, CONTROL), ("<think>", USER_DEFINED))
    metadata = byte_level_metadata(extra_tokens=extra)
    tokenizer = build(metadata)
    user, think = len(metadata["tokenizer.ggml.tokens"]) - 2, len(metadata["tokenizer.ggml.tokens"]) - 1
    ids = tokenizer.encode(f"<|im_start|>the{fullwidth} <think>he<|im_end|>").ids
    assert [ids[0], ids[-1]] == [1, 2]
    assert user in ids
    assert think in ids
    assert tokenizer.get_vocab_size() == len(metadata["tokenizer.ggml.tokens"])
    assert tokenizer.decode(ids) == "the <think>he"
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"<|im_start|>the{fullwidth} <think>he<|im_end|>"


@pytest.mark.parametrize(
    ("pre", "flags", "around"),
    [
        ("smollm", {}, ([], [])),
        ("smollm", {"add_bos_token": True}, ([1], [])),
        ("smollm", {"add_bos_token": True, "add_eos_token": True}, ([1], [2])),
        ("smollm", {"add_eos_token": True}, ([], [2])),
        ("llama-bpe", {}, ([1], [])),
        ("llama-bpe", {"add_bos_token": False}, ([], [])),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(
    pre: str, flags: dict[str, bool], around: tuple[list[int], list[int]]
) -> None:
    """The flags decide; where they are absent, what the family does. `add_special_tokens=False` adds neither."""
    metadata = byte_level_metadata(pre, **{f"tokenizer.ggml.{name}": value for name, value in flags.items()})
    tokenizer = build(metadata)
    bare = tokenizer.encode("the", add_special_tokens=False).ids
    assert tokenizer.encode("the").ids == around[0] + bare + around[1]


@given(st.text(max_size=60))
def test_any_text_survives_byte_level_tokens(text: str) -> None:
    """Encoding and decoding gives the text back, whatever Unicode it holds."""
    for tokenizer in BYTE_LEVEL:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


BYTE_LEVEL = [build(byte_level_metadata(pre)) for pre in ("smollm", "gpt-2", "llama-bpe", "tekken")]

TEXTS = [
    "the thing and the other",
    "  two  spaces",
    "naïve 日本 🎉",
    "",
    " lead",
    "end ",
    "then\nin\n\nin",
    "a<s>b</s>",
]


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken"])
def test_transformers_conversion_agrees_where_it_keeps_the_rules(tmp_path: Path, pre: str) -> None:
    """For the families whose cutting transformers' own conversion knows, both give the same ids and the same text."""
    # A BOS of its own is what the conversion drops; that is tested above.
    metadata = byte_level_metadata(pre, **{"tokenizer.ggml.add_bos_token": False})
    write_gguf(tmp_path / "m.gguf", metadata | CONFIG)
    ours = build(metadata)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf", local_files_only=True)
    for text in [*TEXTS, "123 1231  12", "x's <|im_start|>the<|im_end|>"]:
        assert ours.encode(text).ids == theirs(text)["input_ids"]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids_follow_the_scores(prefix: bool) -> None:
    """Pieces join by highest score, a space goes before the text unless the file forbids it, bytes cover the rest."""
    metadata = sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": prefix})
    tokenizer = build(metadata)
    first = "▁the" if prefix else "the"
    assert tokenizer.encode("the thing").tokens == ["<s>", first, "▁th", "ing"]
    assert tokenizer.encode("é", add_special_tokens=False).tokens[-2:] == ["<0xC3>", "<0xA9>"]
    assert tokenizer.encode("  the", add_special_tokens=False).tokens == ["▁"] * (1 + prefix) + ["▁the"]
    after_special = tokenizer.encode("an<s>the", add_special_tokens=False).tokens
    assert after_special[-2:] == ["<s>", first]
    for text in TEXTS[:-1]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_sentencepiece_agrees_with_transformers_conversion(tmp_path: Path) -> None:
    """Ids equal those of transformers' conversion, BOS included, where no text starts with a space or a special."""
    metadata = sentencepiece_metadata()
    write_gguf(tmp_path / "m.gguf", metadata | CONFIG)
    ours = build(metadata)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf", local_files_only=True)
    for text in [text for text in TEXTS if not text.startswith(" ") and "<s>" not in text]:
        assert ours.encode(text).ids == theirs(text)["input_ids"], text


@pytest.mark.parametrize(("architecture", "after"), [("phi3", ["▁the"]), ("llama", ["▁", "<0x0A>", "the"])])
def test_phi3_has_no_line_ends_behind_its_marks(architecture: str, after: list[str]) -> None:
    """White space that the template has behind a mark of a turn is part of the mark, as the model was trained."""
    metadata = sentencepiece_metadata() | {"general.architecture": architecture}
    tokens = [*metadata["tokenizer.ggml.tokens"], "<|user|>"]
    metadata |= {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], CONTROL],
        "tokenizer.ggml.scores": [*metadata["tokenizer.ggml.scores"], -1000.0],
    }
    expected = [tokens.index(token) for token in ("<|user|>", *after)]
    assert build(metadata).encode("<|user|>\nthe", add_special_tokens=False).ids == expected


def test_every_listed_rule_makes_a_tokenizer_that_loads() -> None:
    """No entry of the table has a pattern that the library refuses."""
    for pre in PRE_TOKENIZERS:
        assert tokens_of(byte_level_metadata(pre), "the")


CONFIG = {
    "llama.block_count": 1,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 8,
    "llama.attention.head_count": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
"""What transformers wants to see before it reads a tokenizer."""
