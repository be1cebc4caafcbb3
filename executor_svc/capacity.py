"""How much an executor can hold: from settings, model and memory to limits. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from executor_svc.batch import Limits
from octavo.rpc.settings import SettingsError


@dataclass(frozen=True)
class Wanted:
    """What the settings ask for; None where they say nothing."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    kv_memory: int | None
    """Bytes."""


def plan_limits(
    wanted: Wanted,
    *,
    vocab_size: int,
    max_position_embeddings: int,
    block_bytes: int,
    default_kv_memory: int,
    unstretched_length: int | None = None,
    window: int = 0,
) -> Limits:
    """Return the limits. Raises SettingsError, with the numbers, where what was asked for does not fit.

    The pool has as many blocks as the KV memory holds, but not more than `max_num_seqs` sequences of `max_model_len`
    tokens can use. Where max_model_len is not asked for it is the model's own, or unstretched_length where longer
    sequences would make the model compute otherwise, or what the pool holds of it. `window`: see Limits.
    """
    longest = wanted.max_model_len or min(max_position_embeddings, unstretched_length or max_position_embeddings)
    if longest > max_position_embeddings:
        raise SettingsError(f"--max-model-len {longest}: the model ends at {max_position_embeddings} tokens")
    if longest < 2:
        raise SettingsError(f"--max-model-len {longest}: at least 2, one token to read and one to write")
    kv_memory = default_kv_memory if wanted.kv_memory is None else wanted.kv_memory
    # With a window a sequence holds that and the tokens of two steps (see scheduler_svc), however long it is.
    held = -(-longest // wanted.block_size)
    if window:
        held = min(held, -(-(window - 1 + 2 * wanted.max_num_batched_tokens) // wanted.block_size) + 1)
    usable = wanted.max_num_seqs * held
    # One more for the null block.
    num_blocks = min(kv_memory // block_bytes, usable + 1)
    pool_tokens = (num_blocks - 1) * wanted.block_size
    if window and num_blocks > held:
        pool_tokens = max(pool_tokens, longest)
    source = "available" if wanted.kv_memory is None else "--kv-memory"
    if pool_tokens < 2:
        needed = 2 + (wanted.block_size == 1)
        raise SettingsError(
            f"{source} {kv_memory} bytes for KV: a block of {wanted.block_size} tokens takes {block_bytes} bytes, and "
            f"at least {needed} are needed"
        )
    if wanted.max_model_len is not None and longest > pool_tokens:
        needed = (-(-longest // wanted.block_size) + 1) * block_bytes
        raise SettingsError(
            f"--max-model-len {longest}: {source} {kv_memory} bytes for KV hold {pool_tokens} tokens, this needs "
            f"{needed} bytes"
        )
    return Limits(
        block_size=wanted.block_size,
        num_blocks=num_blocks,
        max_num_seqs=wanted.max_num_seqs,
        max_num_batched_tokens=wanted.max_num_batched_tokens,
        max_model_len=min(longest, pool_tokens),
        vocab_size=vocab_size,
        window=window,
    )
