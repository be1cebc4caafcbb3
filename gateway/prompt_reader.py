"""The prompt as its client sees it: its tokens, their text, their logprobs, read from the record."""

from __future__ import annotations

from gateway.detokenizer import Detokenizer
from gateway.live_request import LiveRequest
from gateway.requests import OutputParams, Prompt
from gateway.vocabulary import Vocabulary

MAX_PROMPT_TOKENS = 256
"""Tokens in one event: with 20 alternatives each, these are made in a few milliseconds."""


class PromptReader:
    """Reads a request's prompt from a cursor of its own, as far as its logprobs have come, where they are wanted."""

    def __init__(self, request: LiveRequest, vocabulary: Vocabulary, output: OutputParams) -> None:
        self._request = request
        detokenizer = Detokenizer(vocabulary, skip_special_tokens=output.skip_special_tokens)
        self._detokenizer = detokenizer if output.echo else None
        self._has_logprobs = output.has_prompt_logprobs
        self._num_tokens = len(request.prompt_token_ids)
        self._num_read = 0 if output.echo or output.has_prompt_logprobs else self._num_tokens

    def skip(self) -> None:
        """Tell nothing more: it was read already."""
        self._num_read = self._num_tokens

    @property
    def is_done(self) -> bool:
        """All has been told that was asked for."""
        return self._num_read == self._num_tokens

    def take_event(self) -> Prompt | None:
        """Return the next tokens of the prompt, None where there is nothing to tell yet."""
        start = self._num_read
        stop = min(start + MAX_PROMPT_TOKENS, self._num_tokens)
        record = self._request.prompt_logprobs if self._has_logprobs else None
        if record is not None:
            stop = min(stop, len(record) + 1)
            if not start and stop == 1 and not record.is_complete:
                # The first token has no logprob, and goes with those that have.
                return None
        if start == stop:
            return None
        self._num_read = stop
        token_ids = self._request.prompt_token_ids[start:stop]
        text = ""
        if self._detokenizer is not None:
            text = self._detokenizer.push(token_ids)
            if self.is_done:
                text += self._detokenizer.flush()
        columns = None if record is None else record.slice(max(start, 1), stop)
        return Prompt(start, text, token_ids, columns)
