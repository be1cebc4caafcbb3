"""Octavo serves large language models as three gRPC services: gateway, scheduler, executors.

For programs that use one: `octavo.Client`, `octavo.AsyncClient`, `octavo.AdminClient`, `octavo.AsyncAdminClient`, the
values they return and the errors they raise, all from octavo.client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.client import (
        AdminClient,
        AsyncAdminClient,
        AsyncClient,
        AsyncGenerateStream,
        BlockMap,
        BlockUse,
        Choice,
        ChoiceFinished,
        Client,
        Completion,
        ContinuationScore,
        DeadlineExceededError,
        DefaultSampling,
        Delta,
        ExecutorInfo,
        ExecutorKvState,
        FailedPreconditionError,
        FieldViolation,
        FinishReason,
        GenerateOptions,
        GenerateStream,
        InternalServiceError,
        InvalidArgumentError,
        KvState,
        Load,
        Message,
        Messages,
        Model,
        NotFoundError,
        PermissionDeniedError,
        Prompt,
        PromptTokens,
        RequestCancelledError,
        RequestInfo,
        RequestState,
        ResourceExhaustedError,
        Role,
        Scores,
        SequenceKvState,
        ServiceError,
        Started,
        TokenCount,
        TokenLogprobs,
        TopLogprob,
        UnauthenticatedError,
        UnavailableError,
        UnimplementedError,
        Usage,
        WaitReason,
    )

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


def __getattr__(name: str) -> object:
    # Imported when asked for: the services import this package and need no client.
    if name in __all__:
        return getattr(importlib.import_module("octavo.client"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
