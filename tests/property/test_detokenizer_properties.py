"""The detokenizer against whole decodings, over random Unicode, random tokens and every cut into deltas."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_samples import BOS_ID, END_OF_TURN_ID, TokenizerSample, all_samples, byte_fallback, byte_level

from gateway.detokenizer import Detokenizer, decode
from gateway.vocabulary import Vocabulary

REPLACEMENT = "\ufffd"
SAMPLES = all_samples()
EXACT = [sample for sample in SAMPLES if not sample.byte_fallback]
# Characters of one to four bytes, some the tokenizers have whole, some only as bytes, and a real U+FFFD.
TEXT = st.text(st.sampled_from("the cat é€😀\u0301\n .漢\ufffd") | st.characters(codec="utf-8"), max_size=40)


def vocabulary_of(sample: TokenizerSample) -> Vocabulary:
    """Return what the gateway makes of a tokenizer."""
    tokenizer = sample.tokenizer
    tokens = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    special = frozenset(each for each, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    # A model's vocabulary is often larger than its tokenizer's.
    return Vocabulary(tokens, special, json.loads(tokenizer.to_str())["decoder"], max(tokens) + 4)


VOCABULARIES = {sample.name: vocabulary_of(sample) for sample in SAMPLES}


def ids_of(sample: TokenizerSample) -> st.SearchStrategy[list[int]]:
    """Any token ids: most of them no text that the tokenizer would have made, special ones and unused ones included."""
    size = VOCABULARIES[sample.name].size
    return st.lists(st.integers(0, size - 1) | st.integers(0, min(size - 1, 300)), max_size=30)


def deltas_of(detokenizer: Detokenizer, token_ids: list[int], cuts: list[int]) -> list[str]:
    """Push the tokens in the pieces that `cuts` make of them, then flush."""
    edges = [0, *sorted(min(cut, len(token_ids)) for cut in cuts), len(token_ids)]
    pieces = [token_ids[start:stop] for start, stop in itertools.pairwise(edges)]
    return [*map(detokenizer.push, pieces), detokenizer.flush()]


def sentencepiece_decoding(sample: TokenizerSample, token_ids: list[int]) -> str:
    """Decode byte-fallback tokens as SentencePiece does: among bytes good characters stay, each bad byte is a mark.

    Written by itself, from the tokens' spelling, as a check on the implementation and on `tokenizers`.
    """
    text, run = "", b""
    for token_id in [*token_ids, -1]:
        token = sample.tokenizer.id_to_token(token_id) if token_id >= 0 else "end"
        if token is None or token in ("<s>", "</s>", "<|end|>"):
            continue
        if token.startswith("<0x"):
            run += bytes([int(token[3:5], 16)])
            continue
        while run:
            for length in (1, 2, 3, 4):
                try:
                    character = run[:length].decode()
                    break
                except UnicodeDecodeError:
                    character, length = REPLACEMENT, 1
            text, run = text + character, run[length:]
        text += token.replace("▁", " ") if token_id >= 0 else ""
    return text.removeprefix(" ") if "without strip" not in sample.name else text


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
@given(data=st.data())
def test_joined_deltas_equal_the_whole_decoding(sample: TokenizerSample, data: st.DataObject) -> None:
    """For any tokens and any cut, joined deltas are the text that `tokenizers` (or SentencePiece) gives for all."""
    vocabulary = VOCABULARIES[sample.name]
    token_ids = data.draw(ids_of(sample))
    deltas = deltas_of(Detokenizer(vocabulary), token_ids, data.draw(st.lists(st.integers(0, 30), max_size=8)))
    if sample.byte_fallback:
        assert "".join(deltas) == sentencepiece_decoding(sample, token_ids)
    else:
        assert "".join(deltas) == sample.tokenizer.decode(token_ids)
    assert "".join(deltas) == decode(vocabulary, token_ids)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
@given(data=st.data())
def test_decoding_with_special_tokens(sample: TokenizerSample, data: st.DataObject) -> None:
    """With special tokens written out, too, the text is that of `tokenizers`."""
    token_ids = data.draw(ids_of(sample))
    if sample.byte_fallback:  # where `tokenizers` marks good characters, too, SentencePiece is the judge: see above
        token_ids = [each for each in token_ids if not 3 <= each < 259]
    text = decode(VOCABULARIES[sample.name], token_ids, skip_special_tokens=False)
    assert text == sample.tokenizer.decode(token_ids, skip_special_tokens=False)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
@given(text=TEXT)
def test_text_comes_token_by_token(sample: TokenizerSample, text: str) -> None:
    """Token by token, no delta ends inside a character, none is taken back, nothing is held once a text is whole."""
    token_ids = sample.tokenizer.encode(text).ids
    whole = sample.tokenizer.decode(token_ids)
    detokenizer = Detokenizer(VOCABULARIES[sample.name])
    so_far = ""
    for token_id in token_ids:
        so_far += detokenizer.push([token_id])
        assert whole.startswith(so_far)
    assert so_far == whole
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("sample", [byte_level(), byte_fallback()], ids=lambda sample: sample.name)
@given(text=TEXT)
def test_every_end_inside_a_text(sample: TokenizerSample, text: str) -> None:
    """Ended after any token, deltas show every whole character so far, then marks for the bytes of the broken one."""
    token_ids = sample.tokenizer.encode(text).ids
    whole = sample.tokenizer.decode(token_ids)
    for num_tokens in range(len(token_ids) + 1):
        detokenizer = Detokenizer(VOCABULARIES[sample.name])
        characters = detokenizer.push(token_ids[:num_tokens])
        marks = detokenizer.flush()
        assert whole.startswith(characters)
        assert marks == REPLACEMENT * len(marks)
        if not sample.byte_fallback:
            assert characters + marks == sample.tokenizer.decode(token_ids[:num_tokens])
        else:
            assert characters + marks == sentencepiece_decoding(sample, token_ids[:num_tokens])


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
@given(text=TEXT)
def test_output_continues_any_prompt(sample: TokenizerSample, text: str) -> None:
    """Wherever a text is cut into prompt and output, whole prompt characters and joined deltas make up the text.

    So no prompt text is in a delta, no space is lost at the cut, and a character that the cut divides is shown once,
    whole.
    """
    vocabulary = VOCABULARIES[sample.name]
    token_ids = sample.tokenizer.encode(text).ids
    whole = sample.tokenizer.decode(token_ids)
    for num_prompt_tokens in range(1, len(token_ids) + 1):
        prompt, output = token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:]
        prompt_text = Detokenizer(vocabulary).push(prompt)
        joined = "".join(deltas_of(Detokenizer(vocabulary, prompt), output, list(range(len(output)))))
        assert prompt_text + joined == whole


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
@given(data=st.data())
def test_output_after_a_special_token_stands_alone(sample: TokenizerSample, data: st.DataObject) -> None:
    """After a prompt that ends with a special token the text is that of the output tokens by themselves."""
    vocabulary = VOCABULARIES[sample.name]
    prompt = [*data.draw(ids_of(sample)), data.draw(st.sampled_from([BOS_ID, END_OF_TURN_ID]))]
    output = data.draw(ids_of(sample))
    assert "".join(deltas_of(Detokenizer(vocabulary, prompt), output, [1, 2, 3])) == decode(vocabulary, output)


@given(prompt=st.binary(max_size=6), output=st.binary(min_size=1, max_size=8), cuts=st.lists(st.integers(0, 8)))
def test_bytes_of_the_prompt_never_become_marks(prompt: bytes, output: bytes, cuts: list[int]) -> None:
    """Over random bytes: what the prompt leaves open is either completed by the output or leaves no trace in it."""
    sample = byte_level()
    vocabulary = VOCABULARIES[sample.name]
    id_of_byte = {vocabulary.pieces[each]: each for each in range(3, 259)}
    ids = [[id_of_byte[bytes([byte])] for byte in part] for part in (prompt, output)]
    joined = "".join(deltas_of(Detokenizer(vocabulary, ids[0]), ids[1], cuts))
    alone = output.decode(errors="replace")
    open_ends = [prompt[-length:] for length in (1, 2, 3) if len(prompt) >= length]
    completed = [(end + output).decode(errors="replace") for end in open_ends if starts_character(end, output)]
    assert joined == (completed[-1] if completed else alone)


def starts_character(end: bytes, output: bytes) -> bool:
    """Tell whether the bytes of `end` and at least one of `output` are one character."""
    for length in range(len(end) + 1, 5):
        try:
            return len((end + output)[:length].decode()) == 1 and length <= len(end + output)
        except UnicodeDecodeError:
            continue
    return False
