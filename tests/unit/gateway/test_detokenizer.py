"""Text from tokens: the cases worth naming. The general properties are in tests/property."""

from __future__ import annotations

import json

import pytest
from tokenizer_samples import BOS_ID, EOS_ID, TokenizerSample, byte_fallback, byte_level, metaspace, words

from gateway.detokenizer import Detokenizer, decode
from gateway.vocabulary import Vocabulary
from octavo.models.errors import ModelError

REPLACEMENT = "\ufffd"


def vocabulary_of(sample: TokenizerSample, *, padding: int = 0) -> Vocabulary:
    """Return what the gateway makes of a tokenizer, in a model whose vocabulary is larger by `padding`."""
    tokenizer = sample.tokenizer
    tokens = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    special = frozenset(each for each, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    return Vocabulary(tokens, special, json.loads(tokenizer.to_str())["decoder"], max(tokens) + 1 + padding)


def test_prompt_cut_inside_a_character() -> None:
    """Where the prompt ends inside an emoji, the first text is that emoji, whole, and no other of the prompt (A5)."""
    sample = byte_level()
    token_ids = sample.tokenizer.encode("cat 😀 sat").ids
    face = next(i for i, each in enumerate(token_ids) if sample.tokenizer.id_to_token(each).startswith("ð"))
    detokenizer = Detokenizer(vocabulary_of(sample), token_ids[: face + 1])
    deltas = [detokenizer.push([each]) for each in token_ids[face + 1 :]]
    assert "".join(deltas) == "😀 sat"
    assert deltas[0] in ("", "😀")


def test_prompt_cut_inside_a_character_that_is_never_completed() -> None:
    """Where the output goes on with another character, nothing of the prompt's broken one shows, no mark (A5)."""
    sample = byte_level()
    vocabulary = vocabulary_of(sample)
    prompt = sample.tokenizer.encode("cat €").ids[:-1]
    assert vocabulary.pieces[prompt[-1]][-1:] > b"\x7f"
    detokenizer = Detokenizer(vocabulary, prompt)
    assert detokenizer.push(sample.tokenizer.encode("sat").ids) + detokenizer.flush() == "sat"


def test_prompt_cut_inside_a_character_and_no_output() -> None:
    """An output of nothing has no text, whatever the prompt left open (A5)."""
    sample = byte_level()
    detokenizer = Detokenizer(vocabulary_of(sample), sample.tokenizer.encode("€").ids[:-1])
    assert detokenizer.push([]) == ""
    assert detokenizer.push([EOS_ID]) == ""
    assert detokenizer.flush() == ""


def test_bytes_are_held_until_their_character_is_whole() -> None:
    """A character over several tokens comes with its last one; an unfinished one becomes a mark at the end (A6)."""
    sample = byte_level()
    token_ids = sample.tokenizer.encode("€").ids
    assert len(token_ids) > 1
    detokenizer = Detokenizer(vocabulary_of(sample))
    assert [detokenizer.push([each]) for each in token_ids] == [""] * (len(token_ids) - 1) + ["€"]
    assert detokenizer.push(token_ids[:1]) == ""
    assert detokenizer.flush() == REPLACEMENT


def test_special_tokens_inside_a_character() -> None:
    """A special token has no text and does not part the bytes around it."""
    sample = byte_level()
    first, *rest = sample.tokenizer.encode("€").ids
    detokenizer = Detokenizer(vocabulary_of(sample))
    assert detokenizer.push([first, EOS_ID, *rest]) == "€"


def test_byte_fallback_keeps_good_characters_beside_bad_bytes() -> None:
    """In a run of byte tokens each bad byte is one mark; the characters around it stay, as in SentencePiece."""
    sample = byte_fallback()
    vocabulary = vocabulary_of(sample)
    ids = [sample.tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "漢".encode() + b"\xff" + "😀".encode()[:3]]
    detokenizer = Detokenizer(vocabulary)
    assert [detokenizer.push([each]) for each in ids] == ["", "", "漢", REPLACEMENT, "", "", ""]
    assert detokenizer.flush() == REPLACEMENT * 3


def test_one_leading_space_falls_off_a_new_text() -> None:
    """A new text loses the one space its tokenizer put there and no other; a continued one loses none."""
    sample = byte_fallback()
    vocabulary = vocabulary_of(sample)
    space = sample.tokenizer.token_to_id("▁")
    letter = sample.tokenizer.token_to_id("a")
    assert decode(vocabulary, [space, space, letter]) == " a"
    assert Detokenizer(vocabulary, [BOS_ID]).push([space, letter]) == "a"
    assert Detokenizer(vocabulary, [BOS_ID, letter]).push([space, letter]) == " a"
    detokenizer = Detokenizer(vocabulary, [BOS_ID])
    assert [detokenizer.push([each]) for each in (space, space, letter)] == ["", " ", "a"]


@pytest.mark.parametrize(
    ("prepend_scheme", "text"), [("always", "the cat"), ("first", "the cat"), ("never", " the cat")]
)
def test_metaspace_first_token(prepend_scheme: str, text: str) -> None:
    """The first token of a new text loses its space where the tokenizer put it there, behind special tokens too."""
    sample = metaspace(prepend_scheme)
    ids = [sample.tokenizer.token_to_id(token) for token in ("▁the", "▁c", "at")]
    assert decode(vocabulary_of(sample), ids) == text
    assert decode(vocabulary_of(sample), [BOS_ID, *ids]) == text


def test_tokens_without_a_decoder_are_words() -> None:
    """Without a decoder there is a space between each two tokens, also between prompt and output."""
    sample = words()
    ids = sample.tokenizer.encode("the cat sat").ids
    vocabulary = vocabulary_of(sample)
    assert decode(vocabulary, ids) == "the cat sat"
    assert Detokenizer(vocabulary, ids[:2]).push(ids[2:]) == " sat"


def test_ids_that_are_no_tokens() -> None:
    """Ids that only pad the model's vocabulary have no text, and do not count as the first token of one."""
    sample = metaspace()
    vocabulary = vocabulary_of(sample, padding=5)
    ids = [vocabulary.size - 1, sample.tokenizer.token_to_id("▁the"), vocabulary.size - 2]
    assert decode(vocabulary, ids) == "the"


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}]},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]},
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"},
    ],
)
def test_decoders_that_cannot_be_streamed_are_refused(decoder: dict[str, object]) -> None:
    """A decoder whose text depends on what comes later is refused by name when the model is opened."""
    with pytest.raises(ModelError, match="cannot stream"):
        Vocabulary({0: "a"}, frozenset(), decoder, 1)
