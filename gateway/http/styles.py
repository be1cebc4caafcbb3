"""The two kinds of answers: chat completions and completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.http.token_texts import Offsets, TokenRow, TokenTexts
from gateway.vocabulary import Vocabulary


class _Style:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens = TokenTexts(vocabulary)

    def prompt_entries(self, rows: Sequence[TokenRow]) -> list[dict[str, Any] | None]:
        """Return logprobs of the prompt's tokens, null for what nothing is known of."""
        return [None if row.logprob is None else self._tokens.entry(row) for row in rows]


class ChatStyle(_Style):
    """Chat completions: each choice is a message of the assistant's."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    echoes = False

    def head(self) -> dict[str, Any]:
        """Return a choice's first piece: who speaks."""
        return {"delta": {"role": "assistant", "content": ""}}

    def tail(self) -> dict[str, Any]:
        """Return a choice's last piece: nothing new."""
        return {"delta": {}}

    def text_template(self) -> tuple[str, str]:
        """Return what stands around the text of a piece."""
        return '"delta":{"content":', "}"

    def piece(self, text: str) -> dict[str, Any]:
        """Return a piece."""
        return {"delta": {"content": text}}

    def whole(self, text: str) -> dict[str, Any]:
        """Return the message."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, choice: int, rows: Sequence[TokenRow]) -> dict[str, Any]:  # noqa: ARG002 - the interface's
        """Return an entry a token."""
        return {"content": [self._tokens.entry(row) for row in rows], "refusal": None}

    def join(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return all entries."""
        return {"content": [entry for part in parts for entry in part["content"]], "refusal": None}


class CompletionStyle(_Style):
    """Completions: each choice is a text."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"
    echoes = True

    def __init__(self, vocabulary: Vocabulary, num_choices: int, *, skip_special_tokens: bool) -> None:
        """`num_choices`: of all prompts."""
        super().__init__(vocabulary)
        self._offsets = [Offsets(vocabulary, skip_special_tokens=skip_special_tokens) for _ in range(num_choices)]

    def head(self) -> dict[str, Any]:
        """Return a choice's first piece: no text yet."""
        return {"text": ""}

    def tail(self) -> dict[str, Any]:
        """Return a choice's last piece: nothing new."""
        return {"text": ""}

    def text_template(self) -> tuple[str, str]:
        """Return what stands around the text of a piece."""
        return '"text":', ""

    def piece(self, text: str) -> dict[str, Any]:
        """Return a piece."""
        return {"text": text}

    def whole(self, text: str) -> dict[str, Any]:
        """Return the text."""
        return {"text": text}

    def logprobs(self, choice: int, rows: Sequence[TokenRow]) -> dict[str, Any]:
        """Return columns with an entry a token."""
        offsets = self._offsets[choice]
        return {
            "tokens": [self._tokens.text(row.token_id) for row in rows],
            "token_logprobs": [row.logprob for row in rows],
            "top_logprobs": [self._tokens.alternatives(row) for row in rows],
            "text_offset": [offsets.take(row.token_id) for row in rows],
        }

    def join(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the columns of all parts."""
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [value for part in parts for value in part[name]] for name in names}
