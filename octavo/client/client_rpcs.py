"""The rpcs that clients call, typed, and which of them gRPC may send again by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from octavo.client.errors import invalid
from octavo.rpc.seal import SealedAnswers, sealed_request
from octavo.v1 import admin_pb2, inference_pb2, model_pb2

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)


@dataclass(frozen=True)
class Rpc(Generic[RequestT, ResponseT]):
    """One method of a service. Its response is one message or a stream of them, as the contract says."""

    service: str
    name: str
    request_type: type[RequestT]
    response_type: type[ResponseT]

    @property
    def path(self) -> str:
        """The path on the wire."""
        return f"/{self.service}/{self.name}"


def unary_codecs(rpc: Rpc[Any, Any]) -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    """Return how one call is written and its answer read, which may be Damaged where the contract has seals."""
    if "checksum" not in rpc.response_type.DESCRIPTOR.fields_by_name:
        return rpc.request_type.SerializeToString, rpc.response_type.FromString
    answers: list[SealedAnswers] = []

    def write(request: Message) -> bytes:
        data = sealed_request(request)
        answers[:] = [SealedAnswers.to(data)]
        return data

    def read(data: bytes) -> Any:
        return answers[0].opened(rpc.response_type.FromString)(data)

    return write, read


INFERENCE_SERVICE = "octavo.v1.InferenceService"
MODEL_SERVICE = "octavo.v1.ModelService"
ADMIN_SERVICE = "octavo.v1.AdminService"

GENERATE = Rpc(INFERENCE_SERVICE, "Generate", inference_pb2.GenerateRequest, inference_pb2.GenerateResponse)
GENERATE_ONCE = Rpc(
    INFERENCE_SERVICE, "GenerateOnce", inference_pb2.GenerateOnceRequest, inference_pb2.GenerateOnceResponse
)
CANCEL_GENERATE = Rpc(
    INFERENCE_SERVICE, "CancelGenerate", inference_pb2.CancelGenerateRequest, inference_pb2.CancelGenerateResponse
)
SCORE = Rpc(INFERENCE_SERVICE, "Score", inference_pb2.ScoreRequest, inference_pb2.ScoreResponse)
COUNT_TOKENS = Rpc(
    INFERENCE_SERVICE, "CountTokens", inference_pb2.CountTokensRequest, inference_pb2.CountTokensResponse
)
TOKENIZE = Rpc(INFERENCE_SERVICE, "Tokenize", inference_pb2.TokenizeRequest, inference_pb2.TokenizeResponse)
DETOKENIZE = Rpc(INFERENCE_SERVICE, "Detokenize", inference_pb2.DetokenizeRequest, inference_pb2.DetokenizeResponse)
LIST_MODELS = Rpc(MODEL_SERVICE, "ListModels", model_pb2.ListModelsRequest, model_pb2.ListModelsResponse)
GET_MODEL = Rpc(MODEL_SERVICE, "GetModel", model_pb2.GetModelRequest, model_pb2.GetModelResponse)
LIST_REQUESTS = Rpc(ADMIN_SERVICE, "ListRequests", admin_pb2.ListRequestsRequest, admin_pb2.ListRequestsResponse)
CANCEL_REQUEST = Rpc(ADMIN_SERVICE, "CancelRequest", admin_pb2.CancelRequestRequest, admin_pb2.CancelRequestResponse)
GET_LOAD = Rpc(ADMIN_SERVICE, "GetLoad", admin_pb2.GetLoadRequest, admin_pb2.GetLoadResponse)
GET_KV_STATE = Rpc(ADMIN_SERVICE, "GetKvState", admin_pb2.GetKvStateRequest, admin_pb2.GetKvStateResponse)
FLUSH_PREFIX_CACHE = Rpc(
    ADMIN_SERVICE, "FlushPrefixCache", admin_pb2.FlushPrefixCacheRequest, admin_pb2.FlushPrefixCacheResponse
)
DRAIN = Rpc(ADMIN_SERVICE, "Drain", admin_pb2.DrainRequest, admin_pb2.DrainResponse)

ALL_RPCS: tuple[Rpc[Any, Any], ...] = (
    GENERATE,
    GENERATE_ONCE,
    CANCEL_GENERATE,
    SCORE,
    TOKENIZE,
    DETOKENIZE,
    COUNT_TOKENS,
    LIST_MODELS,
    GET_MODEL,
    LIST_REQUESTS,
    CANCEL_REQUEST,
    GET_LOAD,
    GET_KV_STATE,
    FLUSH_PREFIX_CACHE,
    DRAIN,
)

WAITED_FOR = (GENERATE_ONCE, SCORE)
"""Of the unary ones, those that run something: the kill of a service is a pause to them, as it is to a stream."""

# Sent again after an answer that was lost, these would report that there is no such request, or stop a successor.
_NOT_RETRIED = (CANCEL_REQUEST, DRAIN)

SERVICE_CONFIG: dict[str, Any] = {
    "methodConfig": [
        {
            "name": [{"service": rpc.service, "method": rpc.name} for rpc in ALL_RPCS if rpc not in _NOT_RETRIED],
            # 1.5 s in all, give or take gRPC's jitter: the restart of a gateway behind one address.
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
"""gRPC never sends a call again once its answer has begun. The gateway begins with the first event of an accepted
request, so a call that has given its caller a token is never repeated."""

LONGEST_TIMEOUT = 1e9
"""Seconds, some thirty years. gRPC counts nanoseconds in 64 bits, and takes what overflows for a time that is past."""


def grpc_timeout(timeout: float | None) -> float | None:
    """Return the seconds that gRPC is given for a caller's; None without end, so also for infinity.

    Raises TypeError, and InvalidArgumentError for NaN.
    """
    if timeout is None:
        return None
    if isinstance(timeout, str | bytes):
        raise TypeError(f"timeout takes seconds, is {timeout!r}")
    try:
        seconds = float(timeout)
    except OverflowError:
        seconds = math.copysign(math.inf, 1 if timeout > 0 else -1)
    except (TypeError, ValueError):
        raise TypeError(f"timeout takes seconds, is {timeout!r}") from None
    if math.isnan(seconds):
        raise invalid("timeout", "must be a number of seconds, is nan")
    # What is left of a deadline that has passed is negative; gRPC then says so without asking anybody.
    return None if seconds > LONGEST_TIMEOUT else max(0.0, seconds)
