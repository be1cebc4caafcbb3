"""octavo.v1.InferenceService: converts, hands over, converts back. Errors are raised; octavo.rpc maps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import Message

from gateway.auth import ApiKeys
from gateway.convert import (
    command_from,
    response_from,
    response_from_all,
    score_command_from,
    scores_to_proto,
    text_or_chat_from,
)
from gateway.early_refusals import EarlyRefusals
from gateway.generation import Generation
from gateway.generator import Generator
from gateway.permits import Permits
from gateway.requests import GenerateCommand
from gateway.rpc_calls import check_call
from gateway.text_tools import TextTools
from gateway.validation import MAX_CONTINUATIONS, count_choices
from octavo.rpc.seal import SealedAnswers
from octavo.v1 import inference_pb2, inference_pb2_grpc

REQUEST_ID_KEY = "x-octavo-request-id"

_Context = grpc.aio.ServicerContext[Any, Any]
_Whole = TypeVar("_Whole", inference_pb2.GenerateOnceResponse, inference_pb2.ScoreResponse)


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Generates text, scores it, and converts between text and tokens. Every call needs a key where there are keys."""

    def __init__(
        self,
        generator: Generator,
        tools: TextTools,
        keys: ApiKeys,
        permits: Permits,
        early_refusals: EarlyRefusals,
        clock: Callable[[], float],
    ) -> None:
        """`clock`: seconds, the event loop's."""
        self._early_refusals = early_refusals
        self._generator = generator
        self._permits = permits
        self._tools = tools
        self._keys = keys
        self._clock = clock

    async def Generate(self, request: inference_pb2.GenerateRequest, context: _Context) -> None:  # noqa: N802
        """Stream a request's events."""
        call = self._call_of(request, context)
        if not request.HasField("resume"):
            self._refuse_early(request)
        command = command_from(request)
        self._hold_permits(command)
        answers = SealedAnswers(request.checksum) if request.HasField("checksum") else None
        async with self._generator.generate(command, **call) as generation:
            events = await generation.next_events()
            await _send_request_id(generation, context)
            while events:
                for event in events:
                    response = response_from(event)
                    await context.write(response if answers is None else answers.seal(response))
                events = await generation.next_events()

    async def GenerateOnce(  # noqa: N802
        self, request: inference_pb2.GenerateOnceRequest, context: _Context
    ) -> inference_pb2.GenerateOnceResponse | bytes:
        """Answer with all of a request's events at once."""
        call = self._call_of(request, context)
        self._refuse_early(request.request)
        command = command_from(request.request) if request.HasField("request") else GenerateCommand()
        self._hold_permits(command)
        async with self._generator.generate(command, streaming=False, **call) as generation:
            events = await generation.all_events()
            await _send_request_id(generation, context)
            return _sealed(request, response_from_all(events))

    async def Score(  # noqa: N802
        self, request: inference_pb2.ScoreRequest, context: _Context
    ) -> inference_pb2.ScoreResponse | bytes:
        """Answer with how likely continuations are."""
        call = self._call_of(request, context)
        self._early_refusals.check(request.model, len(request.continuations))
        command = score_command_from(request)
        self._permits.hold_for_call(min(len(command.continuations), MAX_CONTINUATIONS), "continuations")
        return _sealed(request, scores_to_proto(await self._generator.score(command, **call)))

    async def CancelGenerate(  # noqa: N802
        self, request: inference_pb2.CancelGenerateRequest, context: _Context
    ) -> inference_pb2.CancelGenerateResponse:
        """End a request that may be taken up."""
        self._generator.cancel(request.resume_token, check_call(self._keys, request, context))
        return inference_pb2.CancelGenerateResponse()

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, context: _Context
    ) -> inference_pb2.TokenizeResponse:
        """Answer with the tokens that Generate would run on."""
        check_call(self._keys, request, context)
        add_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else None
        given = text_or_chat_from(request)
        token_ids = await self._tools.tokenize(request.model, given, add_special_tokens=add_special_tokens)
        return inference_pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(  # noqa: N802
        self, request: inference_pb2.DetokenizeRequest, context: _Context
    ) -> inference_pb2.DetokenizeResponse:
        """Answer with the text that Generate would give."""
        check_call(self._keys, request, context)
        skip_special_tokens = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        text = await self._tools.detokenize(request.model, request.token_ids, skip_special_tokens=skip_special_tokens)
        return inference_pb2.DetokenizeResponse(text=text)

    async def CountTokens(  # noqa: N802
        self, request: inference_pb2.CountTokensRequest, context: _Context
    ) -> inference_pb2.CountTokensResponse:
        """Answer with the size of an input, and the room there is."""
        check_call(self._keys, request, context)
        tokens, max_model_len = await self._tools.count_tokens(request.model, text_or_chat_from(request))
        return inference_pb2.CountTokensResponse(tokens=tokens, max_model_len=max_model_len)

    def _refuse_early(self, request: inference_pb2.GenerateRequest) -> None:
        """Refuse for a full queue before the fields of a request are looked at, which may be many."""
        self._early_refusals.check(request.model, request.best_of or request.n)

    def _hold_permits(self, command: GenerateCommand) -> None:
        field = "n" if command.best_of is None else "best_of"
        self._permits.hold_for_call(count_choices(command), field)

    def _call_of(self, request: Message, context: _Context) -> dict[str, Any]:
        """Check a call; return what it says beside its message: its tenant, its deadline and its trace."""
        tenant = check_call(self._keys, request, context)
        remaining: float | None = context.time_remaining()
        metadata = dict(context.invocation_metadata() or ())
        traceparent = metadata.get("traceparent", "")
        return {
            "tenant": tenant,
            "deadline": None if remaining is None else self._clock() + remaining,
            "traceparent": traceparent if isinstance(traceparent, str) else "",
        }


def _sealed(
    request: inference_pb2.GenerateOnceRequest | inference_pb2.ScoreRequest, response: _Whole
) -> _Whole | bytes:
    """Return a whole answer, sealed where its request was."""
    return SealedAnswers(request.checksum).seal(response) if request.HasField("checksum") else response


async def _send_request_id(generation: Generation, context: _Context) -> None:
    # Only once the request is accepted: a refusal without headers leaves a client's own retries possible.
    await context.send_initial_metadata(((REQUEST_ID_KEY, generation.request_id),))
