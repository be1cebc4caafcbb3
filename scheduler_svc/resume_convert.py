"""A request as it is handed to the gateway that takes it up. Pure functions, as in convert."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.internal.executor.v1.sequence_pb2 import TokenLogprobColumns
from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.rpc.errors import ServiceError
from scheduler_svc.convert import Frame, end_to_proto, request_error
from scheduler_svc.request_record import ChoiceRecord, RequestRecord


def taken_up_frame(counter: int, record: RequestRecord | None, error: ServiceError | None) -> Frame:
    """Return the answer to TakeUp: a record, an error, or both."""
    frame = Frame(taken_up=scheduler_pb2.TakenUp(request=counter))
    if record is not None:
        frame.taken_up.record.CopyFrom(_submit(record))
    if error is not None:
        frame.taken_up.error.CopyFrom(request_error(error))
    return frame


def _submit(record: RequestRecord) -> scheduler_pb2.Submit:
    submit = scheduler_pb2.Submit(
        request=record.id[1],
        label=record.label,
        model=record.model,
        model_revision=record.model_revision,
        tenant=record.tenant,
        prompt_token_ids=record.prompt_token_ids,
        choices=map(_choice, record.choices),
        traceparent=record.traceparent,
        accepted=True,
        cache_salt=record.cache_salt,
        bypass_cache=not record.reads_cache,
        priority=record.priority,
        gateway_state=record.gateway_state,
        first_gateway=record.resume_id[0],
        first_request=record.resume_id[1],
    )
    submit.sampling.CopyFrom(record.sampling)  # type: ignore[arg-type]  # opaque to the domain, from request_record
    submit.stopping.max_tokens = record.stopping.max_tokens
    submit.stopping.min_tokens = record.stopping.min_tokens
    submit.stopping.stop_token_ids.extend(sorted(record.stopping.stop_token_ids))
    submit.age.FromNanoseconds(max(0, round(record.age * 1e9)))
    if record.remaining_deadline is not None:
        submit.remaining_deadline.FromNanoseconds(max(0, round(record.remaining_deadline * 1e9)))
    if record.resume_grace is not None:
        submit.resume_grace.FromNanoseconds(round(record.resume_grace * 1e9))
    return submit


def _choice(choice: ChoiceRecord) -> scheduler_pb2.ChoiceRecord:
    message = scheduler_pb2.ChoiceRecord(token_ids=choice.token_ids)
    if choice.end is not None:
        message.end.CopyFrom(end_to_proto(choice.end))
    if choice.logprobs:
        message.logprobs.CopyFrom(_joined(choice.logprobs))
    return message


def _joined(parts: Iterable[object]) -> TokenLogprobColumns:
    joined = TokenLogprobColumns()
    for part in parts:
        assert isinstance(part, TokenLogprobColumns), "made by batch_result or request_record"
        joined.num_top = part.num_top
        joined.sampled += part.sampled
        joined.top_token_ids += part.top_token_ids
        joined.top_logprobs += part.top_logprobs
    return joined
