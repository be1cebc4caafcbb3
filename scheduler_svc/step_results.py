"""Applies a step's result to its sequences: commits tokens, finds endings, sends what went wrong back to the queue."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from itertools import accumulate, compress

import grpc

from octavo.rpc.errors import ServiceError
from scheduler_svc.batch import (
    BatchResult,
    Event,
    ResultColumns,
    RowResult,
    RowStatus,
    StepFailureReason,
    StepTokens,
    TokensOut,
)
from scheduler_svc.batch_builder import BatchBuilder
from scheduler_svc.executor_state import ExecutorState, InFlightStep, PlainColumns
from scheduler_svc.policies.guard import PolicyGuard
from scheduler_svc.request_errors import RETRY_DELAY
from scheduler_svc.sequence import LiveRequest, Sequence, SequenceStatus

MAX_FAILURES = 3
"""Stays in a row that may end by a failed step or a lost row, nothing committed in between, before the request fails.

The last of them it spent alone on its executor (see ISOLATE_AFTER in waits.py): nobody fails for another.
"""


@dataclass(slots=True)
class Applied:
    """What a result brought. Sequences in `ended` hold nothing any more; requests in `failed` are still to be ended."""

    events: list[Event] = field(default_factory=list)
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
        columns = result.columns
        if columns.handles != step.columns.handles:
            columns = _aligned(step, columns)
        tokens = _plain_tokens(columns, step.samples, executor.spec.vocab_size)
        starts = _starts(columns)
        is_plain = bytearray(b"\1") * len(tokens)
        # The loop runs once per sequence and step. What is not plain is rare.
        for sequence, token_id, row in zip(step.sequences, tokens, range(len(tokens)), strict=True):
            num_tokens = sequence.num_tokens
            if token_id is None or num_tokens >= sequence.steady_until or token_id in sequence.stop_token_ids:
                is_plain[row] = False
                self._apply_row(executor, step, row, columns.row(row, starts[row]), now, applied)
                continue
            if num_tokens >= sequence.publish_at:
                executor.kv.publish(sequence, num_tokens)
            sequence.output_token_ids.append(token_id)
            sequence.num_tokens = num_tokens + 1
        plain = step.sequences
        if not all(is_plain):
            plain = list(compress(plain, is_plain))
        self.num_generated_tokens += len(plain)
        tell = self._policy.on_tokens
        if tell is not None:
            for sequence in plain:
                tell(sequence.view, 0, 1)
        applied.events += _step_tokens(executor, plain)
        return applied

    def _apply_row(
        self, executor: ExecutorState, step: InFlightStep, index: int, row: RowResult, now: float, applied: Applied
    ) -> None:
        """Apply the answer to one row, whatever it brings."""
        sequence, samples = step.sequences[index], step.samples[index]
        sequence.end_steady()
        sequence.num_in_flight_rows -= 1
        if sequence.status is SequenceStatus.FINISHED or sequence.is_discarding:
            return
        if row.status is not RowStatus.OK or len(row.token_ids) != samples:
            self._apply_bad_row(executor, sequence, row, now, applied)
            return
        num_computed = step.columns.num_computed_tokens[index]
        num_scheduled = step.columns.num_scheduled_tokens[index]
        if num_computed < sequence.num_prompt_tokens:
            self._charge_prompt(sequence, num_computed + num_scheduled)
        if num_computed + num_scheduled >= sequence.publish_at:
            executor.kv.publish(sequence, num_computed + num_scheduled)
        if not samples:
            if row.prompt_logprobs is not None:
                applied.events.append(_prompt_only(sequence, row.prompt_logprobs))
            return
        token_id = row.token_ids[0]
        if not 0 <= token_id < executor.spec.vocab_size:
            applied.failed.append((sequence.request, _out_of_vocabulary(sequence, executor, token_id)))
            return
        first_token_index = len(sequence.output_token_ids)
        end = sequence.commit(token_id)
        if row.logprobs is not None and sequence.request.record.resume_grace is not None:
            sequence.logprobs.append(row.logprobs)
        applied.events.append(
            TokensOut(
                sequence.request_id,
                sequence.choice,
                first_token_index,
                row.token_ids,
                row.logprobs,
                end,
                row.prompt_logprobs,
                sequence.num_cached_tokens_untold,
            )
        )
        sequence.num_cached_tokens_untold = 0
        self.num_generated_tokens += 1
        if self._policy.on_tokens is not None:
            self._policy.on_tokens(sequence.view, 0, 1)
        if end is not None:
            executor.remove(sequence)
            sequence.status = SequenceStatus.FINISHED
            applied.ended.append(sequence)
        elif sequence.status is SequenceStatus.RUNNING:
            sequence.begin_steady()

    def _charge_prompt(self, sequence: Sequence, num_computed: int) -> None:
        computed = min(num_computed, sequence.num_prompt_tokens)
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
            sequence.end_steady()
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


def _step_tokens(executor: ExecutorState, plain: list[Sequence]) -> abc.Iterator[StepTokens]:
    """Tell of the last token of each sequence, gateway by gateway."""
    if executor.plain != plain:
        executor.plain, executor.plain_by_gateway = plain, _by_gateway(plain)
    for gateway, (sequences, requests, choices) in executor.plain_by_gateway.items():
        yield StepTokens(
            gateway,
            requests,
            choices,
            [len(sequence.output_token_ids) - 1 for sequence in sequences],
            [sequence.output_token_ids[-1] for sequence in sequences],
        )


def _by_gateway(sequences: list[Sequence]) -> dict[str, PlainColumns]:
    groups: dict[str, list[Sequence]] = {sequence.request_id[0]: [] for sequence in sequences}
    for sequence in sequences:
        groups[sequence.request_id[0]].append(sequence)
    return {
        gateway: (own, [sequence.request_id[1] for sequence in own], [sequence.choice for sequence in own])
        for gateway, own in groups.items()
    }


def _starts(columns: ResultColumns) -> abc.Sequence[int]:
    """Where the tokens of each row begin."""
    if len(columns.token_ids) == len(columns.handles) == columns.num_sampled_tokens.count(1):
        return range(len(columns.handles))
    return [0, *accumulate(columns.num_sampled_tokens)]


def _plain_tokens(columns: ResultColumns, samples: list[int], vocab_size: int) -> abc.Sequence[int | None]:
    """The token of each row that is OK and brings one token and nothing else; None where that is not so."""
    token_ids = columns.token_ids
    if columns.num_sampled_tokens != samples or max(token_ids, default=0) >= vocab_size:
        return [None] * len(samples)
    tokens: abc.Sequence[int | None] = token_ids
    if len(token_ids) != len(samples):
        rest = iter(token_ids)
        tokens = [next(rest) if count else None for count in samples]
    if columns.statuses or columns.logprobs or columns.prompt_logprobs:
        others = {*columns.statuses, *columns.logprobs, *columns.prompt_logprobs}
        tokens = [None if row in others else token_id for row, token_id in enumerate(tokens)]
    return tokens


def _aligned(step: InFlightStep, columns: ResultColumns) -> ResultColumns:
    """The result's rows in the order of the step's; a row that is missing counts as DESYNC, one too many as nothing."""
    by_handle = {row.handle: row for row in columns.rows()}
    return ResultColumns.of(
        by_handle.get(handle) or RowResult(handle, RowStatus.DESYNC, (), None) for handle in step.columns.handles
    )


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
