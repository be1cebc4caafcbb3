"""The events of one request, made of its record as that grows. Every way in (streaming, unary) reads the same."""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from gateway.best_of import likeliest, renumbered
from gateway.choice_reader import ChoiceReader, OnStop
from gateway.detokenizer import Detokenizer
from gateway.live_request import LiveRequest
from gateway.output_text import OutputText
from gateway.prompt_reader import PromptReader
from gateway.requests import Event, OutputParams, ResumePosition, Started, Usage
from gateway.stop_matcher import StopMatcher, StopStrings
from gateway.vocabulary import Vocabulary
from octavo.rpc.errors import ServiceError


class Generation:
    """The events of one request."""

    def __init__(self, request: LiveRequest, vocabulary: Vocabulary, output: OutputParams, on_stop: OnStop) -> None:
        """`on_stop` ends a choice where its text has a stop string."""
        self._request = request
        self._output = output
        self._prompt = PromptReader(request, vocabulary, output)
        texts = _output_texts(request, vocabulary, output)
        self._choices = [
            ChoiceReader(index, choice, text, on_stop, has_logprobs=output.has_logprobs)
            for index, (choice, text) in enumerate(zip(request.choices, texts, strict=True))
        ]
        self._unranked: list[Event] = []
        self._has_started = False
        self._has_finished = False

    def resume_at(self, positions: Mapping[int, ResumePosition]) -> None:
        """Tell only what the reader of an earlier stream has not had. Raises ServiceError for a choice that is none."""
        for choice, position in positions.items():
            if choice >= len(self._choices):
                message = f"resume.positions: there is no choice {choice}, the request has {len(self._choices)}"
                raise ServiceError(grpc.StatusCode.FAILED_PRECONDITION, "BAD_POSITION", message)
            self._choices[choice].resume_at(position)
        if any(position.num_tokens for position in positions.values()):
            self._prompt.skip()

    @property
    def request_id(self) -> str:
        """The id that the gateway gave the request."""
        return self._request.id

    async def next_events(self) -> list[Event]:
        """Return what has happened since the last call, waiting for it; nothing where all has been told.

        In all: Started, then Prompts where they are asked for, then Deltas and one ChoiceFinished per choice, then
        Usage. Where the likeliest choices are to be chosen, all Deltas come at the end, choice by choice. Raises the
        ServiceError that ends the request.
        """
        request = self._request
        while not self._has_finished:
            if request.error is not None:
                raise request.error
            if self._has_news() and (events := self._take_events()):
                return events
            await request.changed.wait()
            request.changed.clear()
        return []

    async def all_events(self) -> list[Event]:
        """Return all events that next_events has not returned, once the last has happened. Raises as next_events."""
        # Text ends a choice only where there are stop strings to look for; else it is not needed before the end.
        if not self._request.stopping.stop:
            await self._request.wait_complete()
        events: list[Event] = []
        while batch := await self.next_events():
            events += batch
        return events

    def _has_news(self) -> bool:
        """Whether there may be events. Who waits is asked behind each of them, and then mostly there are none."""
        request = self._request
        return bool(request.news) or request.is_complete or not self._has_started or not self._prompt.is_done

    def _take_events(self) -> list[Event]:
        request = self._request
        events: list[Event] = []
        if not request.confirmed:
            return events
        if not self._has_started:
            self._has_started = True
            events.append(self._started())
        if not self._prompt.is_done:
            if (prompt := self._prompt.take_event()) is not None:
                events.append(prompt)
            if not self._prompt.is_done:
                return events
        num_best = self._output.num_best
        if num_best is None:
            events += self._read_choices()
        else:
            while request.news:
                self._unranked += self._read_choices()
        if request.is_complete and not request.news:
            self._has_finished = True
            if num_best is not None:
                events += renumbered(self._unranked, likeliest(request.choices, num_best))
            events.append(Usage(len(request.prompt_token_ids), request.num_output_tokens, request.num_cached_tokens))
        return events

    def _read_choices(self) -> list[Event]:
        news = self._request.news
        events: list[Event] = []
        for choice in sorted(news):
            reader = self._choices[choice]
            events += reader.take_events()
            if not reader.has_unread_tokens:
                news.discard(choice)
        return events

    def _started(self) -> Started:
        request = self._request
        request.is_token_told = bool(request.resume_token)
        return Started(
            request_id=request.id,
            model=request.model,
            model_revision=request.model_revision,
            seed=request.sampling.seed,
            prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.stopping.max_tokens,
            cached_tokens=request.num_cached_when_accepted,
            resume_token=request.resume_token,
        )


def _output_texts(request: LiveRequest, vocabulary: Vocabulary, output: OutputParams) -> list[OutputText]:
    stopping = request.stopping
    strings = StopStrings(stopping.stop) if stopping.stop else None
    return [
        OutputText(
            Detokenizer(vocabulary, request.prompt_token_ids, skip_special_tokens=output.skip_special_tokens),
            None if strings is None else StopMatcher(strings, include_stop=output.include_stop),
            include_stop=output.include_stop,
            min_tokens=stopping.min_tokens,
        )
        for _ in request.choices
    ]
