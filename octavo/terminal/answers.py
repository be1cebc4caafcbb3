"""An answer while it comes: its text, and how fast it came."""

from __future__ import annotations

import time
from collections.abc import AsyncIterable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from octavo.client.types import ChoiceFinished, Delta, FinishReason, Started, Usage
from octavo.terminal.figures import counted


class Stream(AsyncIterable[Delta], Protocol):
    """What `AsyncClient.generate` gives, as far as it is used here."""

    @property
    def started(self) -> Started:
        """What was made of the request; known with the first delta."""

    @property
    def choices(self) -> tuple[ChoiceFinished, ...]:
        """How each choice ended; known after the loop."""

    @property
    def usage(self) -> Usage:
        """Token counts; known after the loop."""


@dataclass
class Answer:
    """What has come of one request with one choice. Times are in seconds on the clock of `stream_answer`."""

    text: str = ""
    num_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    seed: int | None = None
    reason: FinishReason | None = None
    """Why it ended; None while it has not, or where it was broken off."""
    asked_at: float = 0.0
    first_at: float = 0.0
    last_at: float = 0.0
    _first_tokens: int = field(default=0, repr=False)

    def take(self, delta: Delta, now: float) -> None:
        """Add new tokens."""
        if self.num_tokens == 0:
            self.first_at, self._first_tokens = now, len(delta.token_ids)
        self.last_at = now
        self.num_tokens += len(delta.token_ids)
        self.text += delta.text

    @property
    def tokens_per_second(self) -> float | None:
        """Rate after the first tokens; None where nothing came after them."""
        elapsed = self.last_at - self.first_at
        return (self.num_tokens - self._first_tokens) / elapsed if elapsed > 0 else None

    def figures(self) -> str:
        """Return the token counts and times in one line."""
        parts = [f"{counted(self.num_tokens, 'token')} written"]
        if self.prompt_tokens is not None:
            cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
            parts.append(f"prompt {self.prompt_tokens}{cached}")
        if self.num_tokens:
            parts.append(f"first token {1000 * (self.first_at - self.asked_at):.0f} ms")
        if self.tokens_per_second is not None:
            parts.append(f"then {self.tokens_per_second:.1f} tokens/s")
        if self.reason is FinishReason.LENGTH:
            parts.append("cut at the limit of tokens")
        return ", ".join(parts)


async def stream_answer(
    stream: Stream, answer: Answer, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> None:
    """Read a stream to its end into `answer`, and give each new text to `write` at once.

    `answer` holds what came also where this is cancelled or raises. Raises ServiceError, and what `write` raises.
    """
    answer.asked_at = clock()
    async for delta in stream:
        answer.take(delta, clock())
        answer.prompt_tokens, answer.seed = stream.started.prompt_tokens, stream.started.seed
        write(delta.text)
    answer.prompt_tokens, answer.cached_tokens = stream.usage.prompt_tokens, stream.usage.cached_tokens
    answer.reason = stream.choices[0].reason
