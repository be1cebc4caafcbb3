import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RequestState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STATE_UNSPECIFIED: _ClassVar[RequestState]
    REQUEST_STATE_WAITING: _ClassVar[RequestState]
    REQUEST_STATE_RUNNING: _ClassVar[RequestState]

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
REQUEST_STATE_UNSPECIFIED: RequestState
REQUEST_STATE_WAITING: RequestState
REQUEST_STATE_RUNNING: RequestState
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
    requests: _containers.RepeatedCompositeFieldContainer[RequestInfo]
    next_page_token: str
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class RequestInfo(_message.Message):
    __slots__ = ("request_id", "label", "model", "tenant", "state", "prompt_tokens", "completion_tokens", "live_choices", "kv_blocks", "executors", "age", "remaining_deadline", "wait_reason", "cached_tokens", "priority", "preemptions")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LIVE_CHOICES_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    REMAINING_DEADLINE_FIELD_NUMBER: _ClassVar[int]
    WAIT_REASON_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    label: str
    model: str
    tenant: str
    state: RequestState
    prompt_tokens: int
    completion_tokens: int
    live_choices: int
    kv_blocks: int
    executors: _containers.RepeatedScalarFieldContainer[str]
    age: _duration_pb2.Duration
    remaining_deadline: _duration_pb2.Duration
    wait_reason: WaitReason
    cached_tokens: int
    priority: int
    preemptions: int
    def __init__(self, request_id: _Optional[str] = ..., label: _Optional[str] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., state: _Optional[_Union[RequestState, str]] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., live_choices: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., executors: _Optional[_Iterable[str]] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., remaining_deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., wait_reason: _Optional[_Union[WaitReason, str]] = ..., cached_tokens: _Optional[int] = ..., priority: _Optional[int] = ..., preemptions: _Optional[int] = ...) -> None: ...

class CancelRequestRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class CancelRequestResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("term", "live_requests", "waiting_sequences", "running_sequences", "preemptions", "gateways", "executors")
    TERM_FIELD_NUMBER: _ClassVar[int]
    LIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    term: int
    live_requests: int
    waiting_sequences: int
    running_sequences: int
    preemptions: int
    gateways: int
    executors: _containers.RepeatedCompositeFieldContainer[ExecutorInfo]
    def __init__(self, term: _Optional[int] = ..., live_requests: _Optional[int] = ..., waiting_sequences: _Optional[int] = ..., running_sequences: _Optional[int] = ..., preemptions: _Optional[int] = ..., gateways: _Optional[int] = ..., executors: _Optional[_Iterable[_Union[ExecutorInfo, _Mapping]]] = ...) -> None: ...

class ExecutorInfo(_message.Message):
    __slots__ = ("address", "incarnation", "model", "running_sequences", "steps_in_flight", "steps", "total_blocks", "free_blocks", "owned_blocks", "cached_blocks", "pinned_blocks", "reserved_blocks", "waiting_sequences")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    STEPS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OWNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WAITING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    address: str
    incarnation: str
    model: str
    running_sequences: int
    steps_in_flight: int
    steps: int
    total_blocks: int
    free_blocks: int
    owned_blocks: int
    cached_blocks: int
    pinned_blocks: int
    reserved_blocks: int
    waiting_sequences: int
    def __init__(self, address: _Optional[str] = ..., incarnation: _Optional[str] = ..., model: _Optional[str] = ..., running_sequences: _Optional[int] = ..., steps_in_flight: _Optional[int] = ..., steps: _Optional[int] = ..., total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., owned_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., reserved_blocks: _Optional[int] = ..., waiting_sequences: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("address", "incarnation", "model", "block_size", "total_blocks", "free_blocks", "owned_blocks", "cached_blocks", "pinned_blocks", "reserved_blocks", "filled_slots", "pending_slots", "internal_fragmentation", "table_blocks", "sharing_factor", "max_model_len", "contiguous_blocks", "contiguous_saving", "running_sequences", "waiting_sequences", "block_map")
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
    RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    WAITING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
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
    running_sequences: int
    waiting_sequences: int
    block_map: BlockMap
    def __init__(self, address: _Optional[str] = ..., incarnation: _Optional[str] = ..., model: _Optional[str] = ..., block_size: _Optional[int] = ..., total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., owned_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., reserved_blocks: _Optional[int] = ..., filled_slots: _Optional[int] = ..., pending_slots: _Optional[int] = ..., internal_fragmentation: _Optional[float] = ..., table_blocks: _Optional[int] = ..., sharing_factor: _Optional[float] = ..., max_model_len: _Optional[int] = ..., contiguous_blocks: _Optional[int] = ..., contiguous_saving: _Optional[float] = ..., running_sequences: _Optional[int] = ..., waiting_sequences: _Optional[int] = ..., block_map: _Optional[_Union[BlockMap, _Mapping]] = ...) -> None: ...

class BlockMap(_message.Message):
    __slots__ = ("blocks_per_cell", "cells")
    BLOCKS_PER_CELL_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    blocks_per_cell: int
    cells: _containers.RepeatedScalarFieldContainer[BlockUse]
    def __init__(self, blocks_per_cell: _Optional[int] = ..., cells: _Optional[_Iterable[_Union[BlockUse, str]]] = ...) -> None: ...

class SequenceKvState(_message.Message):
    __slots__ = ("request_id", "choice", "label", "model", "tenant", "executor", "state", "wait_reason", "prompt_tokens", "completion_tokens", "computed_tokens", "cached_tokens", "blocks", "shared_blocks", "block_ids", "preemptions", "age", "priority")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WAIT_REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice: int
    label: str
    model: str
    tenant: str
    executor: str
    state: RequestState
    wait_reason: WaitReason
    prompt_tokens: int
    completion_tokens: int
    computed_tokens: int
    cached_tokens: int
    blocks: int
    shared_blocks: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    preemptions: int
    age: _duration_pb2.Duration
    priority: int
    def __init__(self, request_id: _Optional[str] = ..., choice: _Optional[int] = ..., label: _Optional[str] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., executor: _Optional[str] = ..., state: _Optional[_Union[RequestState, str]] = ..., wait_reason: _Optional[_Union[WaitReason, str]] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., blocks: _Optional[int] = ..., shared_blocks: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., preemptions: _Optional[int] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., priority: _Optional[int] = ...) -> None: ...

class FlushPrefixCacheRequest(_message.Message):
    __slots__ = ("executor",)
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    executor: str
    def __init__(self, executor: _Optional[str] = ...) -> None: ...

class FlushPrefixCacheResponse(_message.Message):
    __slots__ = ("freed_blocks",)
    FREED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    freed_blocks: int
    def __init__(self, freed_blocks: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("gateway", "scheduler", "executor")
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    gateway: str
    scheduler: bool
    executor: str
    def __init__(self, gateway: _Optional[str] = ..., scheduler: bool = ..., executor: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
