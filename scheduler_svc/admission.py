"""Whether a request may be accepted: refusals carry the numbers, and nothing is kept of what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from octavo.rpc.errors import FieldViolation, ServiceError, invalid_argument
from scheduler_svc.executor_state import ExecutorState
from scheduler_svc.request_errors import RETRY_DELAY
from scheduler_svc.request_record import RequestRecord


def check_record(record: RequestRecord) -> None:
    """Raise INVALID_ARGUMENT where a record makes no sense, whatever runs. Names every bad field."""
    stopping = record.stopping
    violations = []
    if not record.prompt_token_ids:
        violations.append(FieldViolation("input", "needs at least one token"))
    if not record.choices:
        violations.append(FieldViolation("n", "needs at least one choice"))
    if stopping.max_tokens < 1:
        violations.append(FieldViolation("stopping.max_tokens", f"needs at least 1, got {stopping.max_tokens}"))
    if not 0 <= stopping.min_tokens <= stopping.max_tokens:
        description = f"needs 0 to max_tokens ({stopping.max_tokens}), got {stopping.min_tokens}"
        violations.append(FieldViolation("stopping.min_tokens", description))
    if violations:
        raise invalid_argument(violations)


def max_num_tokens(record: RequestRecord, pool: Sequence[ExecutorState]) -> int:
    """The longest that any choice may get, prompt included: by max_tokens and by the pool's model length, if any."""
    length = len(record.prompt_token_ids) + record.stopping.max_tokens
    return min(length, max((executor.spec.max_model_len for executor in pool), default=length))


def check_pool(record: RequestRecord, pool: Sequence[ExecutorState], *, is_known_model: bool) -> None:
    """Raise where no executor of `pool`, the executors of the record's model, can ever run it.

    Errors: NOT_FOUND, UNAVAILABLE where the model's executors are away, FAILED_PRECONDITION on another revision,
    INVALID_ARGUMENT with the numbers on what can never fit. Work that was accepted before waits instead, unless the
    model has another revision now.
    """
    if not pool:
        if record.is_resumed:
            return
        if is_known_model:
            message = f"no executor of model {record.model!r} is ready; try again"
            raise ServiceError(grpc.StatusCode.UNAVAILABLE, "NO_EXECUTOR", message, retry_delay=RETRY_DELAY)
        message = f"no executor serves model {record.model!r}"
        raise ServiceError(grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL", message, metadata={"model": record.model})
    check_revision(record.model, record.model_revision, pool)
    if not record.is_resumed:
        _check_length(record, pool)


def check_revision(model: str, revision: str, pool: Sequence[ExecutorState]) -> None:
    """Raise FAILED_PRECONDITION with both hashes where the model's executors are of another revision."""
    for executor in pool:
        if executor.spec.model_revision != revision:
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "MODEL_REVISION_MISMATCH",
                f"model {model!r} runs at revision {executor.spec.model_revision}, not {revision}",
                metadata={"running_revision": executor.spec.model_revision, "revision": revision},
            )


def _check_length(record: RequestRecord, pool: Sequence[ExecutorState]) -> None:
    num_prompt_tokens = len(record.prompt_token_ids)
    longest = max_num_tokens(record, pool)
    max_model_len = max(executor.spec.max_model_len for executor in pool)
    if num_prompt_tokens >= max_model_len:
        raise ServiceError(
            grpc.StatusCode.INVALID_ARGUMENT,
            "PROMPT_TOO_LONG",
            f"the input has {num_prompt_tokens} tokens; the model takes {max_model_len}, one of output among them",
            metadata={"prompt_tokens": str(num_prompt_tokens), "max_model_len": str(max_model_len)},
            violations=[FieldViolation("input", f"{num_prompt_tokens} tokens, at most {max_model_len - 1} fit")],
        )
    if any(longest <= executor.max_sequence_len for executor in pool):
        return
    roomiest = max(pool, key=lambda executor: executor.max_sequence_len)
    # The last token is never computed, so its KV takes no room.
    needed = -(-(longest - 1) // roomiest.spec.block_size)
    total = roomiest.kv.num_total_blocks
    raise ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "EXCEEDS_KV_MEMORY",
        f"{num_prompt_tokens} tokens of input and {longest - num_prompt_tokens} of output need {needed} KV blocks of "
        f"{roomiest.spec.block_size} tokens; the largest executor has {total}",
        metadata={
            "prompt_tokens": str(num_prompt_tokens),
            "max_tokens": str(record.stopping.max_tokens),
            "max_sequence_len": str(roomiest.max_sequence_len),
            "blocks_needed": str(needed),
            "blocks_total": str(total),
        },
        violations=[FieldViolation("stopping.max_tokens", f"with the input at most {roomiest.max_sequence_len} fit")],
    )
