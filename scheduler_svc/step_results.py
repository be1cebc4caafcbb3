"""Applies a step's result to its sequences: commits tokens, finds endings, sends what went wrong back to the queue."""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc

from octavo.rpc.errors import ServiceError
from scheduler_svc.batch import BatchResult, RowResult, RowStatus, ScheduledRow, StepFailureReason, TokensOut
from scheduler_svc.batch_builder import BatchBuilder
from scheduler_svc.executor_state import ExecutorState, InFlightStep
from scheduler_svc.policies.guard import PolicyGuard
from scheduler_svc.sequence import LiveRequest, Sequence, SequenceStatus

MAX_FAILURES = 3
"""Stays in a row that may end by a failed step or a lost row, nothing committed in between, before the request fails.

The last of them it spent alone on its executor (see ISOLATE_AFTER of the batch builder): nobody fails for another.
"""

RETRY_DELAY = 1.0
"""Seconds after which a client may try again what failed for want of room or executors."""


@dataclass(slots=True)
class Applied:
    """What a result brought. Sequences in `ended` hold nothing any more; requests in `failed` are still to be ended."""

    outputs: list[TokensOut] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)
    failed: list[tuple[LiveRequest, ServiceError]] = field(default_factory=list)


class StepResults:
    """Applies results in the order of their steps."""

    def __init__(self, policy: PolicyGuard, builder: BatchBuilder) -> None:
        self._policy = policy
        self._builder = builder
        self.num_desyncs = 0
        self.num_generated_tokens = 0

    def apply(self, executor: ExecutorState, step: InFlightStep, result: BatchResult, now: float) -> Applied:
        """Apply the answer to `step`, which the caller has taken out of flight."""
        applied = Applied()
        if result.failure is not None:
            self._apply_failure(executor, step, result, now, applied)
            return applied
        outputs = applied.outputs
        num_tokens = 0
        finished, ok = SequenceStatus.FINISHED, RowStatus.OK
        tell = self._policy.on_tokens
        columns = zip(step.sequences, step.rows, step.samples, _aligned(step, result), strict=True)
        for sequence, sent, samples, row in columns:
            sequence.num_in_flight_rows -= 1
            if sequence.status is finished or sequence.is_discarding:
                continue
            token_ids = row.token_ids
            if row.status is not ok or len(token_ids) != samples:
                self._apply_bad_row(executor, sequence, row, now, applied)
                continue
            if sent.num_computed_tokens < sequence.num_prompt_tokens:
                self._charge_prompt(sequence, sent)
            num_computed = sent.num_computed_tokens + sent.num_scheduled_tokens
            if num_computed >= sequence.publish_at:
                executor.kv.publish(sequence, num_computed)
            if not samples:
                if row.prompt_logprobs is not None:
                    outputs.append(_prompt_only(sequence, row.prompt_logprobs))
                continue
            token_id = token_ids[0]
            if not 0 <= token_id < executor.spec.vocab_size:
                applied.failed.append((sequence.request, _out_of_vocabulary(sequence, executor, token_id)))
                continue
            index = len(sequence.output_token_ids)
            end = sequence.commit(token_id)
            output = TokensOut(
                sequence.request_id, sequence.choice, index, token_ids, row.logprobs, end, row.prompt_logprobs
            )
            if sequence.num_cached_tokens_untold:
                output = output._replace(num_cached_tokens=sequence.num_cached_tokens_untold)
                sequence.num_cached_tokens_untold = 0
            outputs.append(output)
            num_tokens += 1
            if tell is not None:
                tell(sequence.view, 0, 1)
            if end is not None:
                executor.remove(sequence)
                sequence.status = finished
                applied.ended.append(sequence)
        self.num_generated_tokens += num_tokens
        return applied

    def _charge_prompt(self, sequence: Sequence, sent: ScheduledRow) -> None:
        computed = min(sent.num_computed_tokens + sent.num_scheduled_tokens, sequence.num_prompt_tokens)
        if computed > sequence.num_charged_prompt_tokens:
            if self._policy.on_tokens is not None:
                self._policy.on_tokens(sequence.view, computed - sequence.num_charged_prompt_tokens, 0)
            sequence.num_charged_prompt_tokens = computed

    def _apply_bad_row(
        self, executor: ExecutorState, sequence: Sequence, row: RowResult, now: float, applied: Applied
    ) -> None:
        if row.status is RowStatus.NAN:
            applied.failed.append((sequence.request, _nan_logits(sequence)))
        elif row.status is RowStatus.BAD_INPUT:
            applied.failed.append((sequence.request, _bad_input(sequence, executor)))
        else:
            # SKIPPED without a reason known here, and a row that brings the wrong number of tokens, are a lost step
            # too.
            self.num_desyncs += 1
            self._restart(executor, sequence, now)
            if self._has_failed_too_often(sequence):
                applied.failed.append((sequence.request, _desynchronized(sequence)))

    def _apply_failure(
        self, executor: ExecutorState, step: InFlightStep, result: BatchResult, now: float, applied: Applied
    ) -> None:
        """Restart every row's sequence: its KV is lost."""
        for sequence in step.sequences:
            sequence.num_in_flight_rows -= 1
            if sequence.status is SequenceStatus.FINISHED or sequence.is_discarding:
                continue
            self._restart(executor, sequence, now)
            if self._has_failed_too_often(sequence):
                applied.failed.append((sequence.request, _step_failed(sequence, result.failure)))

    def _restart(self, executor: ExecutorState, sequence: Sequence, now: float) -> None:
        """Preempt, and ignore what later rows of the stay bring: it would follow a gap."""
        if sequence.status is SequenceStatus.RUNNING:
            self._builder.preempt(executor, sequence, now)
        sequence.is_discarding = True

    def _has_failed_too_often(self, sequence: Sequence) -> bool:
        sequence.num_failures += 1
        return sequence.num_failures > MAX_FAILURES


def _aligned(step: InFlightStep, result: BatchResult) -> tuple[RowResult, ...]:
    """The result's rows in the order of the step's; a row that is missing counts as DESYNC, one too many as nothing."""
    sent_handles = [row.handle for row in step.rows]
    if [row.handle for row in result.rows] == sent_handles:
        return result.rows
    by_handle = {row.handle: row for row in result.rows}
    return tuple(by_handle.get(handle) or RowResult(handle, RowStatus.DESYNC, (), None) for handle in sent_handles)


def _prompt_only(sequence: Sequence, prompt_logprobs: object) -> TokensOut:
    index = len(sequence.output_token_ids)
    return TokensOut(sequence.request_id, sequence.choice, index, (), None, None, prompt_logprobs)


def _where(sequence: Sequence) -> dict[str, str]:
    return {
        "choice": str(sequence.choice),
        "prompt_tokens": str(sequence.num_prompt_tokens),
        "output_tokens": str(len(sequence.output_token_ids)),
    }


def _nan_logits(sequence: Sequence) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.INTERNAL,
        "NAN_LOGITS",
        f"the model computed NaN or infinity for choice {sequence.choice}, at {sequence.num_tokens} tokens",
        metadata=_where(sequence),
    )


def _bad_input(sequence: Sequence, executor: ExecutorState) -> ServiceError:
    largest = max(sequence.token_ids)
    metadata = _where(sequence) | {
        "largest_token_id": str(largest),
        "vocab_size": str(executor.spec.vocab_size),
        "num_blocks": str(executor.spec.num_blocks),
    }
    if largest >= executor.spec.vocab_size:
        message = f"token id {largest} is outside the model's vocabulary of {executor.spec.vocab_size}"
        return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "TOKEN_ID_OUT_OF_RANGE", message, metadata=metadata)
    message = (
        f"an executor refused the input for choice {sequence.choice} at {sequence.num_tokens} tokens as "
        f"beyond its limits of {executor.spec.num_blocks} blocks and {executor.spec.max_model_len} tokens"
    )
    return ServiceError(grpc.StatusCode.INTERNAL, "BAD_INPUT", message, metadata=metadata)


def _out_of_vocabulary(sequence: Sequence, executor: ExecutorState, token_id: int) -> ServiceError:
    message = f"sampled token id {token_id} is outside the model's vocabulary of {executor.spec.vocab_size}"
    metadata = _where(sequence) | {"token_id": str(token_id), "vocab_size": str(executor.spec.vocab_size)}
    return ServiceError(grpc.StatusCode.INTERNAL, "SAMPLED_TOKEN_OUT_OF_RANGE", message, metadata=metadata)


def _desynchronized(sequence: Sequence) -> ServiceError:
    message = f"scheduler and executor disagreed about choice {sequence.choice} {sequence.num_failures} times in a row"
    return ServiceError(grpc.StatusCode.INTERNAL, "DESYNCHRONIZED", message, metadata=_where(sequence))


def _step_failed(sequence: Sequence, reason: StepFailureReason | None) -> ServiceError:
    times = f"{sequence.num_failures} times in a row, at {sequence.num_tokens} tokens"
    if reason is StepFailureReason.OUT_OF_MEMORY:
        return ServiceError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "STEP_OUT_OF_MEMORY",
            f"the device ran out of memory for steps of this request {times}",
            metadata=_where(sequence),
            retry_delay=RETRY_DELAY,
        )
    message = f"steps of this request failed {times}"
    return ServiceError(grpc.StatusCode.INTERNAL, "STEP_FAILED", message, metadata=_where(sequence))
