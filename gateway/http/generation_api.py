"""/v1/chat/completions and /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol

from fastapi import APIRouter, Request
from starlette.responses import Response

from gateway.early_refusals import EarlyRefusals
from gateway.http.answer import GenerationResponse
from gateway.http.caller import call_of
from gateway.http.choices import Style
from gateway.http.commands import chat_command, completion_commands, ignored_fields
from gateway.http.envelope import Asked
from gateway.http.errors import Rename
from gateway.http.fields import ChatRequest, CompletionRequest, Generate
from gateway.http.names import chat_name, completion_name
from gateway.http.pages import answers
from gateway.http.reading import OneReading
from gateway.http.shapes import ChatCompletion, Completion
from gateway.http.styles import ChatStyle, CompletionStyle
from gateway.permits import Permits
from gateway.requests import GenerateCommand
from gateway.served_models import ServedModels
from gateway.validation import count_choices
from gateway.vocabulary import Vocabulary


class Generates(Protocol):
    """What is needed of the domain."""

    def generate(
        self,
        command: GenerateCommand,
        *,
        streaming: bool,
        deadline: float | None = None,
        traceparent: str = "",
        tenant: str = "",
    ) -> AbstractAsyncContextManager[OneReading]:
        """Run a request while the context is open. Raises ServiceError."""


class GenerationApi:
    """The endpoints that generate."""

    def __init__(
        self,
        generator: Generates,
        models: ServedModels,
        permits: Permits,
        early_refusals: EarlyRefusals,
        clock: Callable[[], float],
    ) -> None:
        """`clock`: seconds, the event loop's."""
        self._early_refusals = early_refusals
        self._generator = generator
        self._models = models
        self._permits = permits
        self._clock = clock

    def router(self) -> APIRouter:
        """Return the routes."""
        router = APIRouter(tags=["generation"])
        statuses = (400, 401, 404, 408, 413, 415, 429, 499, 500, 503, 504)
        for path, endpoint, shape in (
            ("/v1/chat/completions", self.create_chat_completion, ChatCompletion),
            ("/v1/completions", self.create_completion, Completion),
        ):
            router.add_api_route(
                path,
                endpoint,
                methods=["POST"],
                response_class=Response,
                responses=answers(shape, streams=True, statuses=statuses),
            )
        return router

    async def create_chat_completion(self, request: Request, body: ChatRequest) -> Response:
        """Continue a conversation."""
        newer = body.max_completion_tokens is not None

        def rename(field: str) -> str:
            name = chat_name(field)
            return "max_completion_tokens" if newer and name == "max_tokens" else name

        return self._response(request, body, [chat_command(body)], ChatStyle, rename)

    async def create_completion(self, request: Request, body: CompletionRequest) -> Response:
        """Continue one or more prompts."""
        commands = completion_commands(body)
        num_choices = len(commands) * _num_choices(body)
        skip_special_tokens = commands[0].skip_special_tokens

        def make_style(vocabulary: Vocabulary) -> Style:
            return CompletionStyle(vocabulary, num_choices, skip_special_tokens=skip_special_tokens)

        return self._response(request, body, commands, make_style, completion_name)

    def _response(
        self,
        request: Request,
        body: Generate,
        commands: Sequence[GenerateCommand],
        make_style: Callable[[Vocabulary], Style],
        rename: Rename,
    ) -> Response:
        first = commands[0]
        call: dict[str, Any] = {**call_of(request, self._clock), "streaming": bool(body.stream)}
        options = body.stream_options
        return GenerationResponse(
            lambda command: self._generator.generate(command, **call),
            commands,
            Asked(
                model=body.model or "",
                created=int(time.time()),
                num_choices=_num_choices(body),
                num_prompts=len(commands),
                # The client's own words for it, which may be negative.
                seed=body.seed if body.seed is not None else first.seed or 0,
                echo=first.echo,
                has_logprobs=first.top_logprobs is not None,
                has_prompt_logprobs=body.prompt_logprobs is not None,
                include_usage=options is not None and bool(options.include_usage),
                ignored=ignored_fields(body),
            ),
            lambda: make_style(self._models.resolve(first.model).tokenizer.vocabulary),
            rename,
            lambda: self._held(commands),
            streaming=bool(body.stream),
        )

    def _held(self, commands: Sequence[GenerateCommand]) -> AbstractContextManager[None]:
        """Return the permits of all prompts: with those of some of them nothing could be answered."""
        if len(commands) > 1:
            field = "input"
        else:
            field = "n" if commands[0].best_of is None else "best_of"
        num_choices = sum(map(count_choices, commands))
        self._early_refusals.check(commands[0].model, num_choices)
        return self._permits.held(num_choices, field)


def _num_choices(body: Generate) -> int:
    return 1 if body.n is None else body.n
