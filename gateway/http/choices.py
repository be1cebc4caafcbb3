"""A request's choices as its answer tells of them: pieces for a stream, wholes for the rest.

The two kinds of answers differ in how a piece and a choice are written; how pieces are made of events is here, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.http.envelope import DONE, Asked, encode_json, ending, envelope, event_bytes, extension, usage_object
from gateway.http.token_texts import TokenRow, rows_of
from gateway.requests import ChoiceEnd, ChoiceFinished, Delta, Event, Prompt, Started, Usage


class Style(Protocol):
    """How one kind of answer is written. `echoes`: the prompt's text is part of the choices' texts."""

    kind: str
    chunk_kind: str
    id_prefix: str
    echoes: bool

    def head(self) -> dict[str, Any]:
        """Return the fields of a choice's first piece, less index, logprobs and finish_reason."""

    def tail(self) -> dict[str, Any]:
        """Return those of its last piece."""

    def text_template(self) -> tuple[str, str]:
        """Return what stands before and behind the text, as JSON, in a piece that is nothing but text."""

    def piece(self, text: str) -> dict[str, Any]:
        """Return the fields of a piece of text."""

    def whole(self, text: str) -> dict[str, Any]:
        """Return the fields of a whole choice."""

    def logprobs(self, choice: int, rows: Sequence[TokenRow]) -> dict[str, Any]:
        """Return the logprobs of the next tokens of a choice."""

    def join(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return logprobs of parts as those of the whole."""

    def prompt_entries(self, rows: Sequence[TokenRow]) -> list[dict[str, Any] | None]:
        """Return logprobs of the prompt's tokens, null for what nothing is known of."""


class Totals:
    """The usage of the prompts of one request."""

    def __init__(self) -> None:
        self._prompt_tokens = self._completion_tokens = self._cached_tokens = 0

    def add(self, usage: Usage) -> None:
        """Add one prompt's."""
        self._prompt_tokens += usage.prompt_tokens
        self._completion_tokens += usage.completion_tokens
        self._cached_tokens += usage.cached_tokens

    def fields(self) -> dict[str, Any]:
        """Return the JSON."""
        return usage_object(self._prompt_tokens, self._completion_tokens, self._cached_tokens)


@dataclass
class _Choice:
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    prompt_text: list[str] = field(default_factory=list)
    prompt_logprobs: list[dict[str, Any] | None] = field(default_factory=list)
    end: ChoiceEnd | None = None


class WholeAnswer:
    """Collects events; `fields` is the answer once all have come."""

    def __init__(self, asked: Asked, style: Style, started: Started) -> None:
        self._asked = asked
        self._style = style
        self._started = started
        self._totals = Totals()
        self._choices = [_Choice() for _ in range(asked.num_prompts * asked.num_choices)]

    def take(self, prompt: int, events: Iterable[Event]) -> None:
        """Take events of the prompt with this index."""
        first = prompt * self._asked.num_choices
        for event in events:
            match event:
                case Delta():
                    choice = self._choices[first + event.choice]
                    choice.texts.append(event.text)
                    if event.logprobs is not None:
                        rows = rows_of(event.token_ids, event.logprobs)
                        choice.logprobs.append(self._style.logprobs(first + event.choice, rows))
                case ChoiceFinished():
                    self._choices[first + event.choice].end = event.end
                case Prompt():
                    self._take_prompt(first, event)
                case Usage():
                    self._totals.add(event)

    def fields(self) -> dict[str, Any]:
        """Return the answer."""
        asked, style = self._asked, self._style
        choices = []
        for index, choice in enumerate(self._choices):
            assert choice.end is not None, "the events of a request end all its choices"
            logprobs = style.join(choice.logprobs) if asked.has_logprobs else None
            fields = {"index": index, **style.whole("".join(choice.texts)), "logprobs": logprobs, **ending(choice.end)}
            if choice.prompt_text:
                fields["prompt_text"] = "".join(choice.prompt_text)
            if choice.prompt_logprobs:
                fields["prompt_logprobs"] = choice.prompt_logprobs
            choices.append(fields)
        around = envelope(asked, self._started, style.kind, style.id_prefix)
        return {**around, "choices": choices, "usage": self._totals.fields(), "octavo": extension(asked)}

    def _take_prompt(self, first: int, event: Prompt) -> None:
        rows = rows_of(event.token_ids, event.logprobs)
        if rows and self._asked.has_prompt_logprobs:
            self._choices[first].prompt_logprobs += self._style.prompt_entries(rows)
        if not self._asked.echo:
            return
        if not self._style.echoes:
            self._choices[first].prompt_text.append(event.text)
            return
        for index in range(first, first + self._asked.num_choices):
            self._choices[index].texts.append(event.text)
            if self._asked.has_logprobs:
                self._choices[index].logprobs.append(self._style.logprobs(index, rows))


class StreamedAnswer:
    """Writes events as server-sent events, as they come."""

    def __init__(self, asked: Asked, style: Style, started: Started) -> None:
        self._asked = asked
        self._style = style
        self._totals = Totals()
        self._around = envelope(asked, started, style.chunk_kind, style.id_prefix)
        # Everything but the text of a piece is the same every time, so it is written once.
        around, last = encode_json(self._around)[:-1], ',"usage":null}\n\n' if asked.include_usage else "}\n\n"
        before, behind = style.text_template()
        self._before = [
            f'data: {around},"choices":[{{"index":{index},{before}'
            for index in range(asked.num_prompts * asked.num_choices)
        ]
        self._behind = f'{behind},"logprobs":null,"finish_reason":null}}]{last}'

    def begin(self) -> bytes:
        """Return the first piece of every choice; the very first tells what Octavo adds."""
        pieces = [self._piece(index, self._style.head()) for index in range(len(self._before))]
        pieces[0]["octavo"] = extension(self._asked)
        return b"".join(map(event_bytes, pieces))

    def take(self, prompt: int, events: Iterable[Event]) -> bytes:
        """Return the pieces that events of the prompt with this index come to."""
        first = prompt * self._asked.num_choices
        pieces: list[bytes] = []
        for event in events:
            match event:
                case Delta(choice=choice, text=text):
                    if event.logprobs is not None and self._asked.has_logprobs:
                        rows = rows_of(event.token_ids, event.logprobs)
                        logprobs = self._style.logprobs(first + choice, rows)
                        pieces.append(event_bytes(self._piece(first + choice, self._style.piece(text), logprobs)))
                    elif text:
                        pieces.append(f"{self._before[first + choice]}{encode_json(text)}{self._behind}".encode())
                case ChoiceFinished():
                    piece = self._piece(first + event.choice, self._style.tail())
                    piece["choices"][0] |= ending(event.end)
                    pieces.append(event_bytes(piece))
                case Prompt():
                    pieces += self._prompt(first, event)
                case Usage():
                    self._totals.add(event)
        return b"".join(pieces)

    def end(self) -> bytes:
        """Return the usage, where asked for, and the mark of the end."""
        if not self._asked.include_usage:
            return DONE
        return event_bytes({**self._around, "choices": [], "usage": self._totals.fields()}) + DONE

    def _prompt(self, first: int, event: Prompt) -> Iterable[bytes]:
        rows = rows_of(event.token_ids, event.logprobs)
        echoes = self._asked.echo and self._style.echoes
        for index in range(first, first + self._asked.num_choices if echoes else first + 1):
            logprobs = self._style.logprobs(index, rows) if echoes and self._asked.has_logprobs else None
            piece = self._piece(index, self._style.piece(event.text if echoes else ""), logprobs)
            if index == first and rows and self._asked.has_prompt_logprobs:
                piece["choices"][0]["prompt_logprobs"] = self._style.prompt_entries(rows)
            if self._asked.echo and not echoes:
                piece["choices"][0]["prompt_text"] = event.text
            yield event_bytes(piece)

    def _piece(self, index: int, fields: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
        choice = {"index": index, **fields, "logprobs": logprobs, "finish_reason": None}
        return {**self._around, "choices": [choice], **({"usage": None} if self._asked.include_usage else {})}
