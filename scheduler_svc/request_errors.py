"""What the clients of requests are told that the scheduler ends by itself."""

from __future__ import annotations

import grpc

from octavo.rpc.errors import ServiceError
from scheduler_svc.sequence import Sequence

RETRY_DELAY = 1.0
"""Seconds after which a client may try again what failed for want of room or executors."""


def shed() -> ServiceError:
    """Return the error of a request that the policy does not start."""
    message = "the scheduler is too busy to start the request; try again"
    return ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "SHED", message, retry_delay=RETRY_DELAY)


def orphaned(sequence: Sequence, timeout: float) -> ServiceError:
    """Return the error of accepted work that no executor could take for `timeout` seconds."""
    record = sequence.request.record
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        "NO_EXECUTOR",
        f"no executor of model {record.model!r} could take {sequence.max_num_tokens} tokens for {timeout:g} s",
        metadata={"model": record.model, "max_num_tokens": str(sequence.max_num_tokens)},
        retry_delay=RETRY_DELAY,
    )


def poisonous(sequence: Sequence) -> ServiceError:
    """Return the error of a request that kills executors."""
    deaths = sequence.num_deaths_alone
    return ServiceError(
        grpc.StatusCode.INTERNAL,
        "POISON",
        f"{deaths} executors died while they ran choice {sequence.choice} of this request and nothing else, at "
        f"{sequence.num_tokens} tokens; it is not run again",
        metadata={"choice": str(sequence.choice), "deaths": str(deaths), "tokens": str(sequence.num_tokens)},
    )
