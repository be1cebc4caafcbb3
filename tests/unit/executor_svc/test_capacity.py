"""From settings, model and memory to limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from executor_svc.batch import Limits
from executor_svc.capacity import Wanted, plan_limits
from octavo.rpc.settings import SettingsError


def _plan(
    *,
    block_size: int = 16,
    max_num_seqs: int = 4,
    max_model_len: int | None = None,
    kv_memory: int | None = None,
    max_position_embeddings: int = 100,
    default_kv_memory: int = 1 << 40,
    unstretched_length: int | None = None,
    window: int = 0,
) -> Limits:
    """A block takes 1000 bytes."""
    return plan_limits(
        Wanted(block_size, max_num_seqs, 64, max_model_len, kv_memory),
        vocab_size=320,
        max_position_embeddings=max_position_embeddings,
        block_bytes=1000,
        default_kv_memory=default_kv_memory,
        unstretched_length=unstretched_length,
        window=window,
    )


def test_the_pool_is_no_larger_than_what_can_be_used() -> None:
    """With memory to spare there are as many blocks as all sequences at full length fill, and the null block."""
    limits = _plan()
    assert limits == Limits(16, 4 * 7 + 1, 4, 64, 100, 320)
    assert _plan(kv_memory=1 << 40) == limits
    assert _plan(max_model_len=33).num_blocks == 4 * 3 + 1


def test_the_pool_is_no_larger_than_memory() -> None:
    """With little memory the pool is what fits, from --kv-memory before the default, and an unset length shrinks to
    it.
    """
    assert _plan(default_kv_memory=5999).num_blocks == 5
    limits = _plan(kv_memory=5999, default_kv_memory=1 << 40)
    assert (limits.num_blocks, limits.max_model_len) == (5, 64)
    assert _plan(kv_memory=9000).max_model_len == 100


def test_a_window_needs_less_than_the_whole_length() -> None:
    """A sequence takes at most its window and the tokens of two steps of 64: so many blocks do for any length."""
    # 9 tokens of the window and 128 of the steps lie in 10 blocks of 16.
    limits = _plan(max_position_embeddings=100_000, window=10)
    assert (limits.num_blocks, limits.max_model_len, limits.window) == (4 * 10 + 1, 100_000, 10)
    small = _plan(max_position_embeddings=100_000, window=10, kv_memory=11_000)
    assert (small.num_blocks, small.max_model_len) == (11, 100_000)
    assert _plan(max_position_embeddings=100_000, window=10, kv_memory=10_000).max_model_len == 9 * 16
    assert _plan(window=10) == replace(_plan(), window=10)


def test_longer_than_unstretched_only_when_asked() -> None:
    """Where longer sequences would change what shorter ones compute, an unset length stays below that."""
    assert _plan(unstretched_length=40).max_model_len == 40
    assert _plan(unstretched_length=40, max_model_len=41).max_model_len == 41


@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [
        ({"max_model_len": 101}, "--max-model-len 101: the model ends at 100 tokens"),
        ({"max_model_len": 65, "kv_memory": 5999}, "--max-model-len 65: --kv-memory 5999 .* 64 tokens.* 6000 bytes"),
        ({"max_model_len": 65, "default_kv_memory": 5999}, "--max-model-len 65: available 5999 .* 64 tokens.* 6000"),
        ({"max_model_len": 1}, "--max-model-len 1: at least 2"),
        ({"kv_memory": 1999}, "--kv-memory 1999 bytes .* 1000 bytes, and at least 2 are needed"),
        ({"kv_memory": 2999, "block_size": 1}, "--kv-memory 2999 bytes .* 1000 bytes, and at least 3 are needed"),
    ],
)
def test_what_does_not_fit_is_said_with_the_numbers(arguments: dict[str, int], numbers: str) -> None:
    """A length past the model's or the pool's, and memory for less than one usable block, are errors with the
    numbers.
    """
    with pytest.raises(SettingsError, match=numbers):
        _plan(**arguments)


def test_a_length_that_just_fits() -> None:
    """The longest length that the pool holds is taken as asked."""
    assert _plan(max_model_len=64, kv_memory=5000).max_model_len == 64
