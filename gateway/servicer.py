"""octavo.v1.InferenceService: converts, hands over, converts back. Errors are raised; octavo.rpc maps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc.aio

from gateway import validation
from gateway.convert import command_from, input_from_tokenize, response_from, response_from_all
from gateway.generation import Generation, Generator
from gateway.prompts import tokenize
from gateway.requests import Event, GenerateCommand
from gateway.served_models import ServedModels
from octavo.rpc.errors import invalid_argument
from octavo.v1 import inference_pb2, inference_pb2_grpc

REQUEST_ID_KEY = "x-octavo-request-id"

_Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Generates text and converts between text and tokens."""

    def __init__(self, generator: Generator, models: ServedModels, clock: Callable[[], float]) -> None:
        """`clock`: seconds, the event loop's."""
        self._generator = generator
        self._models = models
        self._clock = clock

    async def Generate(self, request: inference_pb2.GenerateRequest, context: _Context) -> None:  # noqa: N802
        """Stream a request's events."""
        async with self._generator.generate(command_from(request), **self._call_of(context)) as generation:
            events = await generation.next_events()
            await _send_request_id(generation, context)
            while events:
                for event in events:
                    await context.write(response_from(event))
                events = await generation.next_events()

    async def GenerateOnce(  # noqa: N802
        self, request: inference_pb2.GenerateOnceRequest, context: _Context
    ) -> inference_pb2.GenerateOnceResponse:
        """Answer with all of a request's events at once."""
        command = command_from(request.request) if request.HasField("request") else GenerateCommand()
        async with self._generator.generate(command, **self._call_of(context)) as generation:
            collected: list[Event] = []
            while events := await generation.next_events():
                collected += events
            await _send_request_id(generation, context)
            return response_from_all(collected)

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, _context: _Context
    ) -> inference_pb2.TokenizeResponse:
        """Answer with the tokens that Generate would run on."""
        self._generator.check_open()
        model = self._models.resolve(request.model)
        given = input_from_tokenize(request)
        violations = list(validation.check_input(given, model.prepared))
        if given is None or violations:
            raise invalid_argument(violations)
        add_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else True
        token_ids, violations = await tokenize(model, given, add_special_tokens=add_special_tokens)
        if violations:
            raise invalid_argument(violations)
        return inference_pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(  # noqa: N802
        self, request: inference_pb2.DetokenizeRequest, _context: _Context
    ) -> inference_pb2.DetokenizeResponse:
        """Answer with the text that Generate would give."""
        self._generator.check_open()
        model = self._models.resolve(request.model)
        violations = list(validation.check_token_ids("token_ids", request.token_ids, model.prepared.vocab_size))
        if violations:
            raise invalid_argument(violations)
        skip_special_tokens = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        text = await model.tokenizer.decode(request.token_ids, skip_special_tokens=skip_special_tokens)
        return inference_pb2.DetokenizeResponse(text=text)

    def _call_of(self, context: _Context) -> dict[str, Any]:
        """Return what the call itself says: its deadline and its trace."""
        remaining: float | None = context.time_remaining()
        metadata = dict(context.invocation_metadata() or ())
        traceparent = metadata.get("traceparent", "")
        return {
            "deadline": None if remaining is None else self._clock() + remaining,
            "traceparent": traceparent if isinstance(traceparent, str) else "",
        }


async def _send_request_id(generation: Generation, context: _Context) -> None:
    # Only once the request is accepted: a refusal without headers leaves a client's own retries possible.
    await context.send_initial_metadata(((REQUEST_ID_KEY, generation.request_id),))
