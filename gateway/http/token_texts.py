"""Tokens as the HTTP API shows them beside their logprobs."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, NamedTuple

from gateway.requests import LogprobColumns
from gateway.vocabulary import Vocabulary
from octavo.rpc.logprobs import unpack_floats, unpack_ids

LEAST_LOGPROB = -9999.0
"""What OpenAI writes for a probability of nothing: JSON has no infinity."""


class TokenRow(NamedTuple):
    """One token with its logprob and its alternatives, likeliest first. `logprob` None: nothing is known of it."""

    token_id: int
    logprob: float | None
    top: Sequence[tuple[int, float]]


def rows_of(token_ids: Sequence[int], columns: LogprobColumns | None) -> list[TokenRow]:
    """Return tokens with their logprobs. Where the columns have a row less, the first token has none."""
    if columns is None:
        return []
    num_top = columns.num_top
    top_ids = unpack_ids(columns.top_token_ids)
    top_logprobs = [max(each, LEAST_LOGPROB) for each in unpack_floats(columns.top_logprobs)]
    sampled = unpack_floats(columns.sampled)
    rows = [TokenRow(token_id, None, ()) for token_id in token_ids[: len(token_ids) - len(sampled)]]
    for index, logprob in enumerate(sampled):
        places = slice(index * num_top, (index + 1) * num_top)
        top = list(zip(top_ids[places], top_logprobs[places], strict=True))
        rows.append(TokenRow(token_ids[len(rows)], max(logprob, LEAST_LOGPROB), top))
    return rows


class TokenTexts:
    """The texts of one model's tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._pieces = vocabulary.pieces

    def text(self, token_id: int) -> str:
        """Return a token's text; its bytes as `bytes:\\xf0\\x9f` where they are no whole characters, as OpenAI does."""
        piece = self._pieces[token_id]
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def entry(self, row: TokenRow) -> dict[str, Any]:
        """Return a token as chat completions show it."""
        top = [self._one(token_id, logprob) for token_id, logprob in row.top]
        return {**self._one(row.token_id, row.logprob), "top_logprobs": top}

    def alternatives(self, row: TokenRow) -> dict[str, float] | None:
        """Return the alternatives as completions show them, the token itself among them.

        None where nothing is known. Of two tokens with one text the likelier counts.
        """
        if row.logprob is None:
            return None
        found: dict[str, float] = {}
        for token_id, logprob in (*row.top, (row.token_id, row.logprob)):
            found.setdefault(self.text(token_id), logprob)
        return found

    def _one(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        return {"token": self.text(token_id), "logprob": logprob, "bytes": list(self._pieces[token_id])}


class Offsets:
    """Where in a text each of its tokens begins: in characters, those inside a character where that begins."""

    def __init__(self, vocabulary: Vocabulary, *, skip_special_tokens: bool, start: int = 0) -> None:
        self._pieces = vocabulary.visible_pieces if skip_special_tokens else vocabulary.pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = start

    def take(self, token_id: int) -> int:
        """Return the offset of the next token."""
        offset = self._offset
        self._offset += len(self._decoder.decode(self._pieces[token_id]))
        return offset
