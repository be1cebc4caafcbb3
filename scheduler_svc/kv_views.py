"""The accounts of KV blocks as the scheduler tells them: plain values of one moment."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

from scheduler_svc.request_record import RequestId

SequencePlace = tuple[float, RequestId, int]
"""The place of a sequence in the accounts: its request's arrival on the engine's clock and id, then its choice."""


class WaitReason(Enum):
    """Why a sequence does not run. All but the first and NO_EXECUTOR are said of the head of a queue."""

    BEHIND_OTHERS = "behind_others"
    NO_FREE_BLOCKS = "no_free_blocks"
    NO_FREE_ROW = "no_free_row"
    PREFIX_BEING_COMPUTED = "prefix_being_computed"
    KEPT_APART = "kept_apart"
    STEPS_IN_FLIGHT = "steps_in_flight"
    NO_EXECUTOR = "no_executor"
    NEXT_STEP = "next_step"


class BlockUse(IntEnum):
    """What a block is used for; the values are the contract's."""

    FREE = 1
    CACHED = 2
    OWNED = 3
    SHARED = 4
    PINNED = 5


@dataclass(frozen=True)
class KvQuery:
    """What is asked for.

    address: of one executor and its sequences, empty is all. `limit` sequences past the place `after`; with block_ids
    fewer, where these would be too many. map_cells is the most cells of a block map, 0 is none.
    """

    address: str = ""
    after: SequencePlace | None = None
    limit: int = 0
    block_ids: bool = False
    map_cells: int = 0


@dataclass(frozen=True)
class BlockMap:
    """A ledger in cells from block 1 on. A cell is what most of its blocks are; of equally many, the higher use."""

    blocks_per_cell: int
    cells: tuple[BlockUse, ...]


@dataclass(frozen=True)
class ExecutorKv:
    """The ledger of one session: free + owned + cached + pinned = total; reserved is a part of what can be had.

    Slots are those of owned blocks, a shared block's counted once: filled ones hold a token, or get it from a row in
    flight; pending ones are for tokens that are known and not computed. table_blocks is the length of all tables
    together, contiguous_blocks what the running sequences would hold if each had the memory for the longest one.
    """

    address: str
    incarnation: str
    model: str
    block_size: int
    total_blocks: int
    free_blocks: int
    owned_blocks: int
    cached_blocks: int
    reserved_blocks: int
    filled_slots: int
    pending_slots: int
    table_blocks: int
    max_model_len: int
    contiguous_blocks: int
    num_running: int
    num_waiting: int
    block_map: BlockMap | None

    @property
    def pinned_blocks(self) -> int:
        """What is left: blocks that a copy under way uses."""
        return self.total_blocks - self.free_blocks - self.owned_blocks - self.cached_blocks

    @property
    def owned_slots(self) -> int:
        """Slots of owned blocks."""
        return self.owned_blocks * self.block_size

    @property
    def internal_fragmentation(self) -> float:
        """Share of the owned slots that hold no token."""
        return 1 - self.filled_slots / self.owned_slots if self.owned_slots else 0.0

    @property
    def sharing_factor(self) -> float:
        """Tables that hold an owned block, on average; 0 where nothing is owned."""
        return self.table_blocks / self.owned_blocks if self.owned_blocks else 0.0

    @property
    def contiguous_saving(self) -> float:
        """What is saved against contiguous allocation at the longest length, as a share of that."""
        return 1 - self.owned_blocks / self.contiguous_blocks if self.contiguous_blocks else 0.0


@dataclass(frozen=True)
class SequenceKv:
    """What one choice holds. wait_reason is None where it runs, executor is empty where it has none; age in seconds.

    Tokens count as computed with rows in flight; computed and cached ones are those of the stay that runs. block_ids
    is its table where asked for, else empty.
    """

    request: RequestId
    choice: int
    label: str
    model: str
    tenant: str
    priority: int
    executor: str
    wait_reason: WaitReason | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_blocks: int
    num_shared_blocks: int
    block_ids: tuple[int, ...]
    num_preemptions: int
    age: float


@dataclass(frozen=True)
class KvState:
    """The accounts. num_sequences counts those on all pages; next is where the next page begins, None on the last."""

    executors: tuple[ExecutorKv, ...]
    sequences: tuple[SequenceKv, ...]
    num_sequences: int
    next: SequencePlace | None
