"""Text from tokens, piece by piece.

Text is a pure function of the prompt's last tokens and of the output tokens, however these are cut into deltas: joined
deltas equal the decoding of all tokens at once. It costs constant time a token and keeps at most three bytes.

How the prompt bears on the text, and why none of it shows:

- The output continues the prompt's text, so its first token keeps a leading space where the tokenizer has one. Only
  after a special token (a BOS alone, the end of a chat's turn) does a new text begin.
- A prompt may end inside a character. Where the output completes that character, the whole of it belongs to the
  output: nobody else can show it. Where it does not, the prompt's bytes are dropped and the output stands alone.

Bytes that form no character become U+FFFD once it is certain that they never will, or at the end. How many marks: as
`tokenizers` and SentencePiece do it, see Vocabulary.byte_fallback. (For byte-fallback vocabularies `tokenizers` also
marks the good characters beside a bad byte. They may be with the client already, so here they stay, as in
SentencePiece.)
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

from gateway.vocabulary import Vocabulary

REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4
_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")


class Detokenizer:
    """The text of one output. `push` each token once, in order; `flush` at the end."""

    def __init__(
        self, vocabulary: Vocabulary, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        """`prompt_token_ids` may be the whole prompt: only its tail is read."""
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._pieces = vocabulary.visible_pieces if skip_special_tokens else vocabulary.pieces
        tail = _visible_tail(vocabulary, prompt_token_ids)
        self._starts_text = not tail
        self._strip = vocabulary.leading_strip.count if self._starts_text and vocabulary.leading_strip else 0
        self._characters = _CharacterDecoder(
            b"".join(vocabulary.pieces[each] for each in tail), vocabulary.byte_fallback
        )

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete; empty while a character is incomplete."""
        pieces = self._pieces
        if self._starts_text:
            data = self._push_start(token_ids)
        else:
            data = b"".join([pieces[token_id] for token_id in token_ids])
        return self._stripped(self._characters.decode(data, final=False)) if data else ""

    def flush(self) -> str:
        """Return what incomplete bytes come to at the end of the output."""
        return self._stripped(self._characters.decode(b"", final=True))

    def _push_start(self, token_ids: Sequence[int]) -> bytes:
        hidden = self._vocabulary.special_ids if self._skip_special_tokens else frozenset()
        for index, token_id in enumerate(token_ids):
            if self._vocabulary.is_token(token_id) and token_id not in hidden:
                self._starts_text = False
                rest = [self._pieces[each] for each in token_ids[index + 1 :]]
                return b"".join([self._vocabulary.first_piece(token_id), *rest])
        return b""

    def _stripped(self, text: str) -> str:
        strip = self._vocabulary.leading_strip
        while self._strip and text and strip is not None:
            if not text.startswith(strip.character):
                self._strip = 0
                break
            self._strip -= 1
            text = text.removeprefix(strip.character)
        return text


def decode(vocabulary: Vocabulary, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """Return the text of tokens that follow no prompt."""
    detokenizer = Detokenizer(vocabulary, skip_special_tokens=skip_special_tokens)
    return detokenizer.push(token_ids) + detokenizer.flush()


def _visible_tail(vocabulary: Vocabulary, prompt_token_ids: Sequence[int]) -> list[int]:
    """Return the prompt's last tokens that can hold the bytes of one character, none from before a special token."""
    tail: list[int] = []
    num_bytes = 0
    for token_id in reversed(prompt_token_ids):
        if token_id in vocabulary.special_ids or num_bytes >= _LONGEST_CHARACTER:
            break
        if vocabulary.is_token(token_id):
            tail.append(token_id)
            num_bytes += len(vocabulary.pieces[token_id])
    tail.reverse()
    return tail


class _CharacterDecoder:
    """Bytes to whole characters. Holds the bytes of an incomplete one, `borrowed` ones of which are the prompt's."""

    def __init__(self, before: bytes, byte_fallback: bool) -> None:
        self._held = _incomplete_end(before)
        self._num_borrowed = len(self._held)
        self._mark_each_byte = byte_fallback

    def decode(self, data: bytes, *, final: bool) -> str:
        data = self._held + data
        if self._num_borrowed:
            used = _length_of_first_character(data)
            if used is None and not final:
                self._held = data
                return ""
            if not used:
                data = data[self._num_borrowed :]
            self._num_borrowed = 0
        # surrogateescape turns each bad byte into one lone surrogate, which good bytes never give; replace turns each
        # maximal run that starts like a character into one mark, as Unicode recommends and `tokenizers` does.
        text, used = codecs.utf_8_decode(data, "surrogateescape" if self._mark_each_byte else "replace", final)
        self._held = data[used:]
        return _ESCAPED_BYTE.sub(REPLACEMENT, text) if self._mark_each_byte else text


def _incomplete_end(data: bytes) -> bytes:
    """Return the end of `data` that is the beginning of a character."""
    for length in range(min(len(data), _LONGEST_CHARACTER - 1), 0, -1):
        end = data[-length:]
        if _length_of_first_character(end) is None:
            return end
    return b""


def _length_of_first_character(data: bytes) -> int | None:
    """Return the bytes of the character that `data` begins with; 0: there is none; None: too short to tell."""
    for length in range(1, _LONGEST_CHARACTER + 1):
        try:
            text, used = codecs.utf_8_decode(data[:length], "strict", False)
        except UnicodeDecodeError:
            return 0
        if text:
            return used
    return None
