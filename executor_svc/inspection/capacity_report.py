"""What fits into this machine's memory: how many sequences at once of which length."""

from __future__ import annotations

from typing import Any

from executor_svc.memory import KV_MEMORY_SHARE, available_memory
from octavo.settings import ExecutorSettings

_STEPS_HELD = 2
"""Steps whose tokens a sequence holds KV memory for beyond its window, as the scheduler counts."""
_CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def capacity(
    *,
    weight_bytes: int,
    kv_bytes_per_token: int,
    longest: int,
    window: int = 0,
    context: int | None,
    batch: int | None,
    kv_memory: int | None,
    available: int | None = None,
) -> dict[str, Any]:
    """Return the memory, and how many sequences fit at each of some contexts; with `context` or `batch`, whether
    that fits.

    KV memory is `kv_memory`, or the share of what is free beside the weights that the executor takes. `available`
    replaces this machine's. `window`: how far back the widest layer reads, 0 where one reads everything: a longer
    sequence gives back what every layer has passed.
    """
    free = available_memory() if available is None else available
    beside = max(0, free - weight_bytes)
    kv = int(beside * KV_MEMORY_SHARE) if kv_memory is None else kv_memory
    tokens = kv // kv_bytes_per_token
    contexts = [length for length in _CONTEXTS if length < longest] + [longest]
    report: dict[str, Any] = {
        "available_bytes": free,
        "kv_memory_bytes": kv,
        "kv_tokens": tokens,
        "sequences": [{"context": length, "sequences": tokens // _held(length, window)} for length in contexts],
    }
    if weight_bytes + (0 if kv_memory is None else kv_memory) > free:
        report |= {"fits": False, "verdict": "the weights and the KV memory do not fit what is free"}
    elif context is not None or batch is not None:
        length, sequences = context or longest, batch or 1
        needed = _held(length, window) * sequences
        fits = length <= longest and needed <= tokens
        report["fits"] = fits
        if length > longest:
            report["verdict"] = f"a context of {length} is longer than the model's {longest}"
        else:
            room = f"{_mib(needed * kv_bytes_per_token)} of the {_mib(kv)} of KV memory"
            report["verdict"] = f"{sequences} x {length} tokens need {room}"
    return report


def _held(length: int, window: int) -> int:
    """Return the tokens for which a sequence of this length holds KV memory, with the executor's own settings."""
    if not window:
        return length
    block_size = ExecutorSettings.block_size
    blocks = -(-(window - 1 + _STEPS_HELD * ExecutorSettings.max_num_batched_tokens) // block_size) + 1
    return min(length, blocks * block_size)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
