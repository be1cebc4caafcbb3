"""Contract of the rotary embedding (Su et al. 2021, "RoFormer"), halves-apart layout, and of the KV write in one op,
with the norm of query and key heads (Henry et al. 2020, "Query-Key Normalization for Transformers") of some models.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class RotaryWriteKv(Protocol):
    """Turns queries and keys by their tokens' angles, and puts keys and values into their slots."""

    def __call__(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, slot_mapping: Tensor, key_cache: Tensor, value_cache: Tensor
    ) -> Tensor:
        """Give the turned queries, a new contiguous [T, num_heads, head_dim]; write the caches IN PLACE.

        qkv is [T, (num_heads + 2 * num_kv_heads) * head_dim], contiguous: each token's query heads, then its key heads,
        then its value heads; it is not changed. The caches are [num_blocks, block_size, num_kv_heads, head_dim],
        contiguous, of the same dtype: num_heads follows from them.

        cos and sin are float32 [T, rotary_dim / 2], contiguous, any attention scaling already in them; rotary_dim is
        even and at most head_dim. Each pair (x[i], x[i + rotary_dim / 2]) of the first rotary_dim elements of a query
        or key head becomes (x[i] * cos[i] - x[i + rotary_dim / 2] * sin[i], x[i + rotary_dim / 2] * cos[i] + x[i] *
        sin[i]); the head's other elements stay as they are, all of them where rotary_dim is 0. Computed in float32,
        rounded to the dtype once.

        Turned keys, and values as they are, go into the slots of slot_mapping, int64 [T], each in
        [0, num_blocks * block_size). Slots of block 0 may repeat (padding: what lies there afterwards is undefined);
        others are distinct. All other slots keep their bytes.
        """


class QkNorm(NamedTuple):
    """The RMSNorm of each query and key head."""

    query_weight: Tensor
    """[head_dim] of the model's dtype."""
    key_weight: Tensor
    """[head_dim] likewise."""
    eps: float


class NormRotaryWriteKv(Protocol):
    """RotaryWriteKv of heads that are normed on the way. No field of KernelSet yet: layers norm heads by RmsNorm, which
    every set has; this enters where a layer asks for it.
    """

    def __call__(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        slot_mapping: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        *,
        qk_norm: QkNorm | None = None,
    ) -> Tensor:
        """Do as RotaryWriteKv; with qk_norm each query and key head is first what RmsNorm gives of it, rounded so."""
