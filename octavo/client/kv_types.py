"""The accounts of KV blocks as the operator's API gives them: plain values of one moment, with octavo.v1's fields."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from octavo.client.admin_types import RequestState, WaitReason


class BlockUse(StrEnum):
    """What a KV block is used for."""

    FREE = "free"
    """Nobody holds it, and it holds nothing."""
    CACHED = "cached"
    """Nobody holds it, and the prefix cache keeps it."""
    OWNED = "owned"
    """One sequence holds it."""
    SHARED = "shared"
    """Several sequences hold it."""
    PINNED = "pinned"
    """A copy under way uses it."""
    UNKNOWN = "unknown"
    """A use that this version of the client does not know."""


@dataclass(frozen=True)
class BlockMap:
    """A ledger in cells, in the order of block ids, from block 1 on."""

    blocks_per_cell: int
    """Blocks that a cell stands for; the last one may have fewer."""
    cells: tuple[BlockUse, ...]
    """What most blocks of each cell are used for."""


@dataclass(frozen=True)
class ExecutorKvState:
    """The ledger of one executor: total = free + owned + cached + pinned blocks."""

    address: str
    incarnation: str
    """Random id of the executor's process."""
    model: str
    block_size: int
    """Tokens a block has slots for."""
    total_blocks: int
    free_blocks: int
    """Blocks that nobody holds and that hold nothing."""
    owned_blocks: int
    """Blocks that sequences hold."""
    cached_blocks: int
    """Blocks that nobody holds and the prefix cache keeps, until room is wanted."""
    pinned_blocks: int
    """Blocks that a copy under way uses, and nobody holds."""
    reserved_blocks: int
    """Of the blocks that can be had, free ones first, those kept for short newcomers."""
    filled_slots: int
    """Slots of owned blocks that hold a token's KV, or get it from a step under way; a shared block's count once."""
    pending_slots: int
    """Slots of owned blocks that hold none yet, for tokens that are known: the coming steps fill them."""
    internal_fragmentation: float
    """The share of owned blocks' slots that hold no token, 0 to 1."""
    table_blocks: int
    """Length of all sequences' block tables together."""
    sharing_factor: float
    """table_blocks by owned_blocks: 1 where nothing is shared; 0: nothing is owned."""
    max_model_len: int
    """Longest sequence that it takes, in tokens."""
    contiguous_blocks: int
    """Blocks that the running sequences would hold if each had the memory for the longest one set aside."""
    contiguous_saving: float
    """What is saved against that: 1 - owned_blocks / contiguous_blocks; 0: nothing runs."""
    running_sequences: int
    waiting_sequences: int
    block_map: BlockMap | None
    """Who holds which block; None: it was not asked for."""


@dataclass(frozen=True)
class SequenceKvState:
    """What one choice of a live request holds, and why it waits where it does."""

    request_id: str
    choice: int
    label: str
    """The request_id that its client gave; empty: none."""
    model: str
    tenant: str
    """Who pays; empty where the gateway knows no tenants."""
    executor: str
    """Address of the executor that it runs on or waits for; empty: of none."""
    state: RequestState
    wait_reason: WaitReason | None
    """None: it runs."""
    prompt_tokens: int
    completion_tokens: int
    computed_tokens: int
    """Tokens whose KV it has, or gets from a step under way; 0 where it waits."""
    cached_tokens: int
    """Of those, the ones that it took from the prefix cache when it came to run."""
    blocks: int
    shared_blocks: int
    """Of its blocks, those that other sequences hold too."""
    block_ids: tuple[int, ...]
    """Its blocks in the order of its tokens; empty: they were not asked for, or it has none."""
    preemptions: int
    """Times that it was put back to make room."""
    age: float
    """Seconds since a gateway first accepted the request."""
    priority: int
    """Higher is more urgent."""


@dataclass(frozen=True)
class KvState:
    """Who holds what."""

    term: int
    """The scheduler's term: a higher one is a newer scheduler."""
    executors: tuple[ExecutorKvState, ...]
    """Those in session, oldest session first."""
    sequences: tuple[SequenceKvState, ...]
    """Those that have not ended, running and waiting, the oldest request's first; as many as were asked for."""
    num_sequences: int
    """How many there are."""
