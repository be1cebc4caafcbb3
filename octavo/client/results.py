"""What a stream has told beside its deltas: the part that is the same however it is read."""

from __future__ import annotations

from typing import TypeVar

from octavo.client.types import ChoiceFinished, Delta, PromptTokens, Started, Usage
from octavo.rpc.seal import SealedAnswers

_T = TypeVar("_T")


class StreamResults:
    """The results of one request, known bit by bit as its stream is read."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._choices: dict[int, ChoiceFinished] = {}
        self._usage: Usage | None = None
        self._prompts: list[PromptTokens] = []

    @property
    def started(self) -> Started:
        """What was made of the request; known with the first delta. Raises RuntimeError before that."""
        return _known(self._started, "started", "it comes with the first delta")

    @property
    def prompt(self) -> PromptTokens | None:
        """The prompt's tokens where echo or prompt_logprobs was given; all of them are known with the first delta."""
        parts = self._prompts
        if len(parts) > 1:
            whole = PromptTokens(
                "".join(part.text for part in parts),
                tuple(token_id for part in parts for token_id in part.token_ids),
                tuple(logprobs for part in parts for logprobs in part.logprobs),
            )
            self._prompts = parts = [whole]
        return parts[0] if parts else None

    @property
    def choices(self) -> tuple[ChoiceFinished, ...]:
        """How each choice ended, by index; within the loop, those that have ended."""
        return tuple(self._choices[index] for index in sorted(self._choices))

    @property
    def usage(self) -> Usage:
        """Token counts of the whole request; known after the loop. Raises RuntimeError before its end."""
        return _known(self._usage, "usage", "it comes with the end of the loop")

    def _is_whole(self, answers: SealedAnswers | None) -> bool:
        """Whether a stream that ends now has told all: its last answer, where seals say that there must be one, too."""
        return self._usage is not None or answers is None or not answers.is_sealed

    def _take(self, event: Started | PromptTokens | Delta | ChoiceFinished | Usage | None) -> Delta | None:
        """Keep an event; return it where it is for the loop."""
        match event:
            case Delta():
                return event
            case Started():
                self._started = event
            case PromptTokens():
                self._prompts = [*self._prompts, event]
            case ChoiceFinished():
                self._choices[event.choice] = event
            case Usage():
                self._usage = event
        return None


def _known(value: _T | None, name: str, advice: str) -> _T:
    if value is None:
        raise RuntimeError(f"{name} is not known yet: {advice}")
    return value
