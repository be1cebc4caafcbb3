import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from octavo.internal.executor.v1 import sequence_pb2 as _sequence_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]

class CancelReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CANCEL_REASON_UNSPECIFIED: _ClassVar[CancelReason]
    CANCEL_REASON_CLIENT: _ClassVar[CancelReason]
    CANCEL_REASON_DEADLINE: _ClassVar[CancelReason]
    CANCEL_REASON_STOP: _ClassVar[CancelReason]
    CANCEL_REASON_SHUTDOWN: _ClassVar[CancelReason]

class WaitReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WAIT_REASON_UNSPECIFIED: _ClassVar[WaitReason]
    WAIT_REASON_BEHIND_OTHERS: _ClassVar[WaitReason]
    WAIT_REASON_NO_FREE_BLOCKS: _ClassVar[WaitReason]
    WAIT_REASON_NO_FREE_ROW: _ClassVar[WaitReason]
    WAIT_REASON_PREFIX_BEING_COMPUTED: _ClassVar[WaitReason]
    WAIT_REASON_KEPT_APART: _ClassVar[WaitReason]
    WAIT_REASON_STEPS_IN_FLIGHT: _ClassVar[WaitReason]
    WAIT_REASON_NO_EXECUTOR: _ClassVar[WaitReason]
    WAIT_REASON_NEXT_STEP: _ClassVar[WaitReason]

class BlockUse(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_USE_UNSPECIFIED: _ClassVar[BlockUse]
    BLOCK_USE_FREE: _ClassVar[BlockUse]
    BLOCK_USE_CACHED: _ClassVar[BlockUse]
    BLOCK_USE_OWNED: _ClassVar[BlockUse]
    BLOCK_USE_SHARED: _ClassVar[BlockUse]
    BLOCK_USE_PINNED: _ClassVar[BlockUse]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
CANCEL_REASON_UNSPECIFIED: CancelReason
CANCEL_REASON_CLIENT: CancelReason
CANCEL_REASON_DEADLINE: CancelReason
CANCEL_REASON_STOP: CancelReason
CANCEL_REASON_SHUTDOWN: CancelReason
WAIT_REASON_UNSPECIFIED: WaitReason
WAIT_REASON_BEHIND_OTHERS: WaitReason
WAIT_REASON_NO_FREE_BLOCKS: WaitReason
WAIT_REASON_NO_FREE_ROW: WaitReason
WAIT_REASON_PREFIX_BEING_COMPUTED: WaitReason
WAIT_REASON_KEPT_APART: WaitReason
WAIT_REASON_STEPS_IN_FLIGHT: WaitReason
WAIT_REASON_NO_EXECUTOR: WaitReason
WAIT_REASON_NEXT_STEP: WaitReason
BLOCK_USE_UNSPECIFIED: BlockUse
BLOCK_USE_FREE: BlockUse
BLOCK_USE_CACHED: BlockUse
BLOCK_USE_OWNED: BlockUse
BLOCK_USE_SHARED: BlockUse
BLOCK_USE_PINNED: BlockUse

class AttachRequest(_message.Message):
    __slots__ = ("hello", "submit", "cancel", "ack", "take_up", "checksum")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    TAKE_UP_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    submit: Submit
    cancel: Cancel
    ack: Ack
    take_up: TakeUp
    checksum: int
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., take_up: _Optional[_Union[TakeUp, _Mapping]] = ..., checksum: _Optional[int] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("welcome", "accepted", "rejected", "step_outputs", "finished", "model_pools", "load_report", "taken_up", "drain_gateway", "checksum")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    STEP_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    MODEL_POOLS_FIELD_NUMBER: _ClassVar[int]
    LOAD_REPORT_FIELD_NUMBER: _ClassVar[int]
    TAKEN_UP_FIELD_NUMBER: _ClassVar[int]
    DRAIN_GATEWAY_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    accepted: Accepted
    rejected: Rejected
    step_outputs: StepOutputs
    finished: Finished
    model_pools: ModelPools
    load_report: LoadReport
    taken_up: TakenUp
    drain_gateway: DrainGateway
    checksum: int
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ..., step_outputs: _Optional[_Union[StepOutputs, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., model_pools: _Optional[_Union[ModelPools, _Mapping]] = ..., load_report: _Optional[_Union[LoadReport, _Mapping]] = ..., taken_up: _Optional[_Union[TakenUp, _Mapping]] = ..., drain_gateway: _Optional[_Union[DrainGateway, _Mapping]] = ..., checksum: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("incarnation", "cell", "highest_term", "live_requests")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CELL_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_TERM_FIELD_NUMBER: _ClassVar[int]
    LIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    cell: str
    highest_term: int
    live_requests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, incarnation: _Optional[str] = ..., cell: _Optional[str] = ..., highest_term: _Optional[int] = ..., live_requests: _Optional[_Iterable[int]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("term", "unknown_requests")
    TERM_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    term: int
    unknown_requests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, term: _Optional[int] = ..., unknown_requests: _Optional[_Iterable[int]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request", "label", "model", "model_revision", "tenant", "prompt_token_ids", "sampling", "stopping", "choices", "age", "remaining_deadline", "traceparent", "accepted", "cache_salt", "bypass_cache", "priority", "remaining_queue_ttl", "remaining_first_token", "resume_grace", "gateway_state", "first_gateway", "first_request")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    REMAINING_DEADLINE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    BYPASS_CACHE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REMAINING_QUEUE_TTL_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RESUME_GRACE_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_STATE_FIELD_NUMBER: _ClassVar[int]
    FIRST_GATEWAY_FIELD_NUMBER: _ClassVar[int]
    FIRST_REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: int
    label: str
    model: str
    model_revision: str
    tenant: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _sequence_pb2.SamplingParams
    stopping: _sequence_pb2.StoppingParams
    choices: _containers.RepeatedCompositeFieldContainer[ChoiceRecord]
    age: _duration_pb2.Duration
    remaining_deadline: _duration_pb2.Duration
    traceparent: str
    accepted: bool
    cache_salt: str
    bypass_cache: bool
    priority: int
    remaining_queue_ttl: _duration_pb2.Duration
    remaining_first_token: _duration_pb2.Duration
    resume_grace: _duration_pb2.Duration
    gateway_state: bytes
    first_gateway: str
    first_request: int
    def __init__(self, request: _Optional[int] = ..., label: _Optional[str] = ..., model: _Optional[str] = ..., model_revision: _Optional[str] = ..., tenant: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_sequence_pb2.SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[_sequence_pb2.StoppingParams, _Mapping]] = ..., choices: _Optional[_Iterable[_Union[ChoiceRecord, _Mapping]]] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., remaining_deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., traceparent: _Optional[str] = ..., accepted: bool = ..., cache_salt: _Optional[str] = ..., bypass_cache: bool = ..., priority: _Optional[int] = ..., remaining_queue_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., remaining_first_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., resume_grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., gateway_state: _Optional[bytes] = ..., first_gateway: _Optional[str] = ..., first_request: _Optional[int] = ...) -> None: ...

class TakeUp(_message.Message):
    __slots__ = ("request", "first_gateway", "first_request", "tenant")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    FIRST_GATEWAY_FIELD_NUMBER: _ClassVar[int]
    FIRST_REQUEST_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request: int
    first_gateway: str
    first_request: int
    tenant: str
    def __init__(self, request: _Optional[int] = ..., first_gateway: _Optional[str] = ..., first_request: _Optional[int] = ..., tenant: _Optional[str] = ...) -> None: ...

class TakenUp(_message.Message):
    __slots__ = ("request", "record", "error")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request: int
    record: Submit
    error: RequestError
    def __init__(self, request: _Optional[int] = ..., record: _Optional[_Union[Submit, _Mapping]] = ..., error: _Optional[_Union[RequestError, _Mapping]] = ...) -> None: ...

class DrainGateway(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ChoiceRecord(_message.Message):
    __slots__ = ("token_ids", "end", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    end: ChoiceEnd
    logprobs: _sequence_pb2.TokenLogprobColumns
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., end: _Optional[_Union[ChoiceEnd, _Mapping]] = ..., logprobs: _Optional[_Union[_sequence_pb2.TokenLogprobColumns, _Mapping]] = ...) -> None: ...

class ChoiceEnd(_message.Message):
    __slots__ = ("reason", "stop_token_id")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    stop_token_id: int
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request", "choice", "reason", "kept_tokens")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request: int
    choice: int
    reason: CancelReason
    kept_tokens: int
    def __init__(self, request: _Optional[int] = ..., choice: _Optional[int] = ..., reason: _Optional[_Union[CancelReason, str]] = ..., kept_tokens: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("request", "num_cached_tokens")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request: int
    num_cached_tokens: int
    def __init__(self, request: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("request", "error")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request: int
    error: RequestError
    def __init__(self, request: _Optional[int] = ..., error: _Optional[_Union[RequestError, _Mapping]] = ...) -> None: ...

class StepOutputs(_message.Message):
    __slots__ = ("sequence", "outputs", "requests", "choices", "token_indexes", "token_ids")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_INDEXES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    outputs: _containers.RepeatedCompositeFieldContainer[ChoiceOutput]
    requests: _containers.RepeatedScalarFieldContainer[int]
    choices: _containers.RepeatedScalarFieldContainer[int]
    token_indexes: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence: _Optional[int] = ..., outputs: _Optional[_Iterable[_Union[ChoiceOutput, _Mapping]]] = ..., requests: _Optional[_Iterable[int]] = ..., choices: _Optional[_Iterable[int]] = ..., token_indexes: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChoiceOutput(_message.Message):
    __slots__ = ("request", "choice", "first_token_index", "token_ids", "logprobs", "end", "prompt_logprobs", "num_cached_tokens")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request: int
    choice: int
    first_token_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _sequence_pb2.TokenLogprobColumns
    end: ChoiceEnd
    prompt_logprobs: PromptLogprobs
    num_cached_tokens: int
    def __init__(self, request: _Optional[int] = ..., choice: _Optional[int] = ..., first_token_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[_sequence_pb2.TokenLogprobColumns, _Mapping]] = ..., end: _Optional[_Union[ChoiceEnd, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("first_token_index", "columns")
    FIRST_TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    first_token_index: int
    columns: _sequence_pb2.TokenLogprobColumns
    def __init__(self, first_token_index: _Optional[int] = ..., columns: _Optional[_Union[_sequence_pb2.TokenLogprobColumns, _Mapping]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("sequence", "request", "error")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    request: int
    error: RequestError
    def __init__(self, sequence: _Optional[int] = ..., request: _Optional[int] = ..., error: _Optional[_Union[RequestError, _Mapping]] = ...) -> None: ...

class RequestError(_message.Message):
    __slots__ = ("code", "reason", "message", "metadata", "field", "retry_delay")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_DELAY_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    message: str
    metadata: _containers.ScalarMap[str, str]
    field: str
    retry_delay: _duration_pb2.Duration
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ..., field: _Optional[str] = ..., retry_delay: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ModelPools(_message.Message):
    __slots__ = ("pools",)
    POOLS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[ModelPool]
    def __init__(self, pools: _Optional[_Iterable[_Union[ModelPool, _Mapping]]] = ...) -> None: ...

class ModelPool(_message.Message):
    __slots__ = ("model", "model_revision", "num_executors", "max_model_len")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    NUM_EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_revision: str
    num_executors: int
    max_model_len: int
    def __init__(self, model: _Optional[str] = ..., model_revision: _Optional[str] = ..., num_executors: _Optional[int] = ..., max_model_len: _Optional[int] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("num_waiting", "num_running", "kv_usage", "is_stalled", "num_received_frames", "full_queues")
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    IS_STALLED_FIELD_NUMBER: _ClassVar[int]
    NUM_RECEIVED_FRAMES_FIELD_NUMBER: _ClassVar[int]
    FULL_QUEUES_FIELD_NUMBER: _ClassVar[int]
    num_waiting: int
    num_running: int
    kv_usage: float
    is_stalled: bool
    num_received_frames: int
    full_queues: _containers.RepeatedCompositeFieldContainer[FullQueue]
    def __init__(self, num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., kv_usage: _Optional[float] = ..., is_stalled: bool = ..., num_received_frames: _Optional[int] = ..., full_queues: _Optional[_Iterable[_Union[FullQueue, _Mapping]]] = ...) -> None: ...

class FullQueue(_message.Message):
    __slots__ = ("model", "num_choices", "num_tokens", "max_choices", "max_tokens", "drained_choices_per_second", "drained_tokens_per_second", "num_free_rows", "is_idle")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_CHOICES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CHOICES_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAINED_CHOICES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DRAINED_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_ROWS_FIELD_NUMBER: _ClassVar[int]
    IS_IDLE_FIELD_NUMBER: _ClassVar[int]
    model: str
    num_choices: int
    num_tokens: int
    max_choices: int
    max_tokens: int
    drained_choices_per_second: float
    drained_tokens_per_second: float
    num_free_rows: int
    is_idle: bool
    def __init__(self, model: _Optional[str] = ..., num_choices: _Optional[int] = ..., num_tokens: _Optional[int] = ..., max_choices: _Optional[int] = ..., max_tokens: _Optional[int] = ..., drained_choices_per_second: _Optional[float] = ..., drained_tokens_per_second: _Optional[float] = ..., num_free_rows: _Optional[int] = ..., is_idle: bool = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("term", "num_requests", "num_waiting", "num_running", "num_preemptions", "num_desyncs", "num_gateways", "executors")
    TERM_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_DESYNCS_FIELD_NUMBER: _ClassVar[int]
    NUM_GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    term: int
    num_requests: int
    num_waiting: int
    num_running: int
    num_preemptions: int
    num_desyncs: int
    num_gateways: int
    executors: _containers.RepeatedCompositeFieldContainer[ExecutorLoad]
    def __init__(self, term: _Optional[int] = ..., num_requests: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_desyncs: _Optional[int] = ..., num_gateways: _Optional[int] = ..., executors: _Optional[_Iterable[_Union[ExecutorLoad, _Mapping]]] = ...) -> None: ...

class ExecutorLoad(_message.Message):
    __slots__ = ("address", "incarnation", "model", "num_running", "num_in_flight", "num_steps", "total_blocks", "free_blocks", "owned_blocks", "cached_blocks", "pinned_blocks", "reserved_blocks", "num_waiting")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OWNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    address: str
    incarnation: str
    model: str
    num_running: int
    num_in_flight: int
    num_steps: int
    total_blocks: int
    free_blocks: int
    owned_blocks: int
    cached_blocks: int
    pinned_blocks: int
    reserved_blocks: int
    num_waiting: int
    def __init__(self, address: _Optional[str] = ..., incarnation: _Optional[str] = ..., model: _Optional[str] = ..., num_running: _Optional[int] = ..., num_in_flight: _Optional[int] = ..., num_steps: _Optional[int] = ..., total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., owned_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., reserved_blocks: _Optional[int] = ..., num_waiting: _Optional[int] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests", "next_page_token")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[LiveRequest]
    next_page_token: str
    def __init__(self, requests: _Optional[_Iterable[_Union[LiveRequest, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class LiveRequest(_message.Message):
    __slots__ = ("gateway", "request", "label", "model", "tenant", "num_prompt_tokens", "num_output_tokens", "num_waiting", "num_running", "num_blocks", "executors", "age", "remaining_deadline", "wait_reason", "num_cached_tokens", "priority", "num_preemptions")
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    REMAINING_DEADLINE_FIELD_NUMBER: _ClassVar[int]
    WAIT_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    gateway: str
    request: int
    label: str
    model: str
    tenant: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_waiting: int
    num_running: int
    num_blocks: int
    executors: _containers.RepeatedScalarFieldContainer[str]
    age: _duration_pb2.Duration
    remaining_deadline: _duration_pb2.Duration
    wait_reason: WaitReason
    num_cached_tokens: int
    priority: int
    num_preemptions: int
    def __init__(self, gateway: _Optional[str] = ..., request: _Optional[int] = ..., label: _Optional[str] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., num_blocks: _Optional[int] = ..., executors: _Optional[_Iterable[str]] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., remaining_deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., wait_reason: _Optional[_Union[WaitReason, str]] = ..., num_cached_tokens: _Optional[int] = ..., priority: _Optional[int] = ..., num_preemptions: _Optional[int] = ...) -> None: ...

class CancelRequestRequest(_message.Message):
    __slots__ = ("gateway", "request")
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    gateway: str
    request: int
    def __init__(self, gateway: _Optional[str] = ..., request: _Optional[int] = ...) -> None: ...

class CancelRequestResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetKvStateRequest(_message.Message):
    __slots__ = ("executor", "page_size", "page_token", "block_ids", "map_cells")
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    MAP_CELLS_FIELD_NUMBER: _ClassVar[int]
    executor: str
    page_size: int
    page_token: str
    block_ids: bool
    map_cells: int
    def __init__(self, executor: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., block_ids: bool = ..., map_cells: _Optional[int] = ...) -> None: ...

class GetKvStateResponse(_message.Message):
    __slots__ = ("term", "executors", "sequences", "num_sequences", "next_page_token")
    TERM_FIELD_NUMBER: _ClassVar[int]
    EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    term: int
    executors: _containers.RepeatedCompositeFieldContainer[ExecutorKvState]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceKvState]
    num_sequences: int
    next_page_token: str
    def __init__(self, term: _Optional[int] = ..., executors: _Optional[_Iterable[_Union[ExecutorKvState, _Mapping]]] = ..., sequences: _Optional[_Iterable[_Union[SequenceKvState, _Mapping]]] = ..., num_sequences: _Optional[int] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ExecutorKvState(_message.Message):
    __slots__ = ("address", "incarnation", "model", "block_size", "total_blocks", "free_blocks", "owned_blocks", "cached_blocks", "pinned_blocks", "reserved_blocks", "filled_slots", "pending_slots", "internal_fragmentation", "table_blocks", "sharing_factor", "max_model_len", "contiguous_blocks", "contiguous_saving", "num_running", "num_waiting", "block_map")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OWNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FILLED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    PENDING_SLOTS_FIELD_NUMBER: _ClassVar[int]
    INTERNAL_FRAGMENTATION_FIELD_NUMBER: _ClassVar[int]
    TABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHARING_FACTOR_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    CONTIGUOUS_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CONTIGUOUS_SAVING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    BLOCK_MAP_FIELD_NUMBER: _ClassVar[int]
    address: str
    incarnation: str
    model: str
    block_size: int
    total_blocks: int
    free_blocks: int
    owned_blocks: int
    cached_blocks: int
    pinned_blocks: int
    reserved_blocks: int
    filled_slots: int
    pending_slots: int
    internal_fragmentation: float
    table_blocks: int
    sharing_factor: float
    max_model_len: int
    contiguous_blocks: int
    contiguous_saving: float
    num_running: int
    num_waiting: int
    block_map: BlockMap
    def __init__(self, address: _Optional[str] = ..., incarnation: _Optional[str] = ..., model: _Optional[str] = ..., block_size: _Optional[int] = ..., total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., owned_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., reserved_blocks: _Optional[int] = ..., filled_slots: _Optional[int] = ..., pending_slots: _Optional[int] = ..., internal_fragmentation: _Optional[float] = ..., table_blocks: _Optional[int] = ..., sharing_factor: _Optional[float] = ..., max_model_len: _Optional[int] = ..., contiguous_blocks: _Optional[int] = ..., contiguous_saving: _Optional[float] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., block_map: _Optional[_Union[BlockMap, _Mapping]] = ...) -> None: ...

class BlockMap(_message.Message):
    __slots__ = ("blocks_per_cell", "cells")
    BLOCKS_PER_CELL_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    blocks_per_cell: int
    cells: _containers.RepeatedScalarFieldContainer[BlockUse]
    def __init__(self, blocks_per_cell: _Optional[int] = ..., cells: _Optional[_Iterable[_Union[BlockUse, str]]] = ...) -> None: ...

class SequenceKvState(_message.Message):
    __slots__ = ("gateway", "request", "choice", "label", "model", "tenant", "executor", "is_running", "wait_reason", "num_prompt_tokens", "num_output_tokens", "num_computed_tokens", "num_cached_tokens", "num_blocks", "num_shared_blocks", "block_ids", "num_preemptions", "age", "priority")
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    IS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAIT_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    gateway: str
    request: int
    choice: int
    label: str
    model: str
    tenant: str
    executor: str
    is_running: bool
    wait_reason: WaitReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_blocks: int
    num_shared_blocks: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    num_preemptions: int
    age: _duration_pb2.Duration
    priority: int
    def __init__(self, gateway: _Optional[str] = ..., request: _Optional[int] = ..., choice: _Optional[int] = ..., label: _Optional[str] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., executor: _Optional[str] = ..., is_running: bool = ..., wait_reason: _Optional[_Union[WaitReason, str]] = ..., num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_shared_blocks: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., num_preemptions: _Optional[int] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., priority: _Optional[int] = ...) -> None: ...

class FlushPrefixCacheRequest(_message.Message):
    __slots__ = ("executor",)
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    executor: str
    def __init__(self, executor: _Optional[str] = ...) -> None: ...

class FlushPrefixCacheResponse(_message.Message):
    __slots__ = ("num_freed_blocks",)
    NUM_FREED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_freed_blocks: int
    def __init__(self, num_freed_blocks: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("scheduler", "executor", "gateway")
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    scheduler: bool
    executor: str
    gateway: str
    def __init__(self, scheduler: bool = ..., executor: _Optional[str] = ..., gateway: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
