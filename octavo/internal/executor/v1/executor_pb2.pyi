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

class RowStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_STATUS_UNSPECIFIED: _ClassVar[RowStatus]
    ROW_STATUS_OK: _ClassVar[RowStatus]
    ROW_STATUS_SKIPPED: _ClassVar[RowStatus]
    ROW_STATUS_NAN: _ClassVar[RowStatus]
    ROW_STATUS_BAD_INPUT: _ClassVar[RowStatus]
    ROW_STATUS_DESYNC: _ClassVar[RowStatus]

class StepFailureReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_FAILURE_REASON_UNSPECIFIED: _ClassVar[StepFailureReason]
    STEP_FAILURE_REASON_OUT_OF_MEMORY: _ClassVar[StepFailureReason]
    STEP_FAILURE_REASON_INTERNAL: _ClassVar[StepFailureReason]
    STEP_FAILURE_REASON_REFUSED: _ClassVar[StepFailureReason]
ROW_STATUS_UNSPECIFIED: RowStatus
ROW_STATUS_OK: RowStatus
ROW_STATUS_SKIPPED: RowStatus
ROW_STATUS_NAN: RowStatus
ROW_STATUS_BAD_INPUT: RowStatus
ROW_STATUS_DESYNC: RowStatus
STEP_FAILURE_REASON_UNSPECIFIED: StepFailureReason
STEP_FAILURE_REASON_OUT_OF_MEMORY: StepFailureReason
STEP_FAILURE_REASON_INTERNAL: StepFailureReason
STEP_FAILURE_REASON_REFUSED: StepFailureReason

class ExecuteRequest(_message.Message):
    __slots__ = ("begin", "step_batch", "drain", "checksum")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    STEP_BATCH_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    begin: Begin
    step_batch: StepBatch
    drain: Drain
    checksum: int
    def __init__(self, begin: _Optional[_Union[Begin, _Mapping]] = ..., step_batch: _Optional[_Union[StepBatch, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., checksum: _Optional[int] = ...) -> None: ...

class ExecuteResponse(_message.Message):
    __slots__ = ("welcome", "ready", "step_result", "progress", "checksum")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    STEP_RESULT_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    ready: Ready
    step_result: StepResult
    progress: Progress
    checksum: int
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., step_result: _Optional[_Union[StepResult, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., checksum: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("incarnation", "cell", "model_name", "model_revision", "tokenizer_hash", "fingerprint", "block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "vocab_size", "highest_term", "window")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CELL_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_TERM_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    cell: str
    model_name: str
    model_revision: str
    tokenizer_hash: str
    fingerprint: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    highest_term: int
    window: int
    def __init__(self, incarnation: _Optional[str] = ..., cell: _Optional[str] = ..., model_name: _Optional[str] = ..., model_revision: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., fingerprint: _Optional[str] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., highest_term: _Optional[int] = ..., window: _Optional[int] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("term", "session")
    TERM_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    term: int
    session: int
    def __init__(self, term: _Optional[int] = ..., session: _Optional[int] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Progress(_message.Message):
    __slots__ = ("num_ticks",)
    NUM_TICKS_FIELD_NUMBER: _ClassVar[int]
    num_ticks: int
    def __init__(self, num_ticks: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: int
    def __init__(self, session: _Optional[int] = ...) -> None: ...

class StepBatch(_message.Message):
    __slots__ = ("session", "step", "released_handles", "new_sequences", "handles", "num_scheduled_tokens", "num_computed_tokens", "num_new_blocks", "new_blocks")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RELEASED_HANDLES_FIELD_NUMBER: _ClassVar[int]
    NEW_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    NUM_SCHEDULED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_NEW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    session: int
    step: int
    released_handles: _containers.RepeatedScalarFieldContainer[int]
    new_sequences: _containers.RepeatedCompositeFieldContainer[NewSequence]
    handles: _containers.RepeatedScalarFieldContainer[int]
    num_scheduled_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_computed_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_new_blocks: _containers.RepeatedScalarFieldContainer[int]
    new_blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[int] = ..., step: _Optional[int] = ..., released_handles: _Optional[_Iterable[int]] = ..., new_sequences: _Optional[_Iterable[_Union[NewSequence, _Mapping]]] = ..., handles: _Optional[_Iterable[int]] = ..., num_scheduled_tokens: _Optional[_Iterable[int]] = ..., num_computed_tokens: _Optional[_Iterable[int]] = ..., num_new_blocks: _Optional[_Iterable[int]] = ..., new_blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class NewSequence(_message.Message):
    __slots__ = ("handle", "token_ids", "num_prompt_tokens", "choice", "sampling", "stopping", "num_cached_tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    choice: int
    sampling: _sequence_pb2.SamplingParams
    stopping: _sequence_pb2.StoppingParams
    num_cached_tokens: int
    def __init__(self, handle: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., choice: _Optional[int] = ..., sampling: _Optional[_Union[_sequence_pb2.SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[_sequence_pb2.StoppingParams, _Mapping]] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("session", "step", "handles", "statuses", "num_sampled_tokens", "token_ids", "logprobs", "timings", "prompt_logprobs", "failure")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    session: int
    step: int
    handles: _containers.RepeatedScalarFieldContainer[int]
    statuses: _containers.RepeatedScalarFieldContainer[RowStatus]
    num_sampled_tokens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[RowLogprobs]
    timings: StageTimings
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[RowPromptLogprobs]
    failure: StepFailure
    def __init__(self, session: _Optional[int] = ..., step: _Optional[int] = ..., handles: _Optional[_Iterable[int]] = ..., statuses: _Optional[_Iterable[_Union[RowStatus, str]]] = ..., num_sampled_tokens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[RowLogprobs, _Mapping]]] = ..., timings: _Optional[_Union[StageTimings, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[RowPromptLogprobs, _Mapping]]] = ..., failure: _Optional[_Union[StepFailure, _Mapping]] = ...) -> None: ...

class RowLogprobs(_message.Message):
    __slots__ = ("row", "columns")
    ROW_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    row: int
    columns: _sequence_pb2.TokenLogprobColumns
    def __init__(self, row: _Optional[int] = ..., columns: _Optional[_Union[_sequence_pb2.TokenLogprobColumns, _Mapping]] = ...) -> None: ...

class RowPromptLogprobs(_message.Message):
    __slots__ = ("row", "first_token_index", "columns")
    ROW_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    row: int
    first_token_index: int
    columns: _sequence_pb2.TokenLogprobColumns
    def __init__(self, row: _Optional[int] = ..., first_token_index: _Optional[int] = ..., columns: _Optional[_Union[_sequence_pb2.TokenLogprobColumns, _Mapping]] = ...) -> None: ...

class StageTimings(_message.Message):
    __slots__ = ("queue", "prepare", "forward", "sample", "idle", "ahead")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    queue: _duration_pb2.Duration
    prepare: _duration_pb2.Duration
    forward: _duration_pb2.Duration
    sample: _duration_pb2.Duration
    idle: _duration_pb2.Duration
    ahead: _duration_pb2.Duration
    def __init__(self, queue: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prepare: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., forward: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., sample: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., idle: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., ahead: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class StepFailure(_message.Message):
    __slots__ = ("reason", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: StepFailureReason
    message: str
    def __init__(self, reason: _Optional[_Union[StepFailureReason, str]] = ..., message: _Optional[str] = ...) -> None: ...
