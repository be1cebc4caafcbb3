"""Clients of the public API: Client and AsyncClient, and AdminClient and AsyncAdminClient for operators.

Arrows go one way: clients -> streams -> connections -> converters, discovery -> errors, types. A connection hides where
its peer is and how it was found, so that more than one peer concerns nothing above it.
"""

from octavo.client.admin_types import ExecutorInfo, Load, RequestInfo, RequestState, WaitReason
from octavo.client.async_client import AsyncAdminClient, AsyncClient
from octavo.client.async_stream import AsyncGenerateStream
from octavo.client.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InternalServiceError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
)
from octavo.client.kv_types import BlockMap, BlockUse, ExecutorKvState, KvState, SequenceKvState
from octavo.client.sync_client import AdminClient, Client
from octavo.client.sync_stream import GenerateStream
from octavo.client.types import (
    Choice,
    ChoiceFinished,
    Completion,
    ContinuationScore,
    DefaultSampling,
    Delta,
    FinishReason,
    GenerateOptions,
    Message,
    Messages,
    Model,
    Prompt,
    PromptTokens,
    Role,
    Scores,
    Started,
    TokenCount,
    TokenLogprobs,
    TopLogprob,
    Usage,
)
from octavo.rpc.errors import FieldViolation, ServiceError

__all__ = [
    "AdminClient",
    "AsyncAdminClient",
    "AsyncClient",
    "AsyncGenerateStream",
    "BlockMap",
    "BlockUse",
    "Choice",
    "ChoiceFinished",
    "Client",
    "Completion",
    "ContinuationScore",
    "DeadlineExceededError",
    "DefaultSampling",
    "Delta",
    "ExecutorInfo",
    "ExecutorKvState",
    "FailedPreconditionError",
    "FieldViolation",
    "FinishReason",
    "GenerateOptions",
    "GenerateStream",
    "InternalServiceError",
    "InvalidArgumentError",
    "KvState",
    "Load",
    "Message",
    "Messages",
    "Model",
    "NotFoundError",
    "PermissionDeniedError",
    "Prompt",
    "PromptTokens",
    "RequestCancelledError",
    "RequestInfo",
    "RequestState",
    "ResourceExhaustedError",
    "Role",
    "Scores",
    "SequenceKvState",
    "ServiceError",
    "Started",
    "TokenCount",
    "TokenLogprobs",
    "TopLogprob",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "Usage",
    "WaitReason",
]
