"""The accounts of KV blocks as a person reads them: in 80 columns, and without colour."""

from __future__ import annotations

import itertools
import string
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from octavo.terminal.figures import counted, duration, share
from octavo.terminal.style import Style, printable
from octavo.terminal.table import table

if TYPE_CHECKING:
    from octavo.client.kv_types import ExecutorKvState, KvState, SequenceKvState

MAP_WIDTH = 64
MAP_CELLS = 16 * MAP_WIDTH
"""Cells of a map that still fits on a screen."""

_LETTERS = string.ascii_uppercase + string.ascii_lowercase
_NOT_LISTED = "#"
_SIGNS = {"free": ".", "cached": "=", "shared": "+", "pinned": "!", "unknown": "?"}
_MEANINGS = {".": "free", "=": "cached", "+": "held by several", "!": "pinned", "?": "unknown", "#": "held, not listed"}
_LONGEST_TENANT = 8
_KEPT_DIGITS = 4


def kv_report(state: KvState, style: Style) -> str:
    """Return each executor with its ledger, its map and the sequences that are listed, then those without one."""
    parts = []
    for executor in state.executors:
        own = [each for each in state.sequences if each.executor == executor.address]
        parts.append(_executor(executor, own, style))
    addresses = {each.address for each in state.executors}
    homeless = [each for each in state.sequences if each.executor not in addresses]
    if homeless:
        parts.append(f"{style.bold('on no executor')}\n\n{_sequences(homeless, {}, style)}")
    num_listed = len(state.sequences)
    if num_listed < state.num_sequences:
        parts.append(f"{num_listed} of {counted(state.num_sequences, 'sequence')} listed; --limit N lists more")
    return "\n\n".join(parts) or "no executor is ready"


def _executor(kv: ExecutorKvState, sequences: Sequence[SequenceKvState], style: Style) -> str:
    running = [each for each in sequences if each.blocks]
    letters = {id(each): letter for each, letter in zip(running, _LETTERS, strict=False)}
    ledger = f"{kv.free_blocks} free + {kv.owned_blocks} owned + {kv.cached_blocks} cached + {kv.pinned_blocks} pinned"
    lines = [
        f"{style.bold(printable(kv.address))}  {printable(kv.model)}, blocks of {counted(kv.block_size, 'token')}",
        f"  blocks     {kv.total_blocks} = {ledger}",
        f"  reserved   {kv.reserved_blocks}, kept for short newcomers",
    ]
    if kv.owned_blocks:
        num_slots = kv.owned_blocks * kv.block_size
        slots = f"{num_slots - kv.filled_slots} of {num_slots}; {kv.pending_slots} are filled next"
        saving = share(kv.contiguous_blocks - kv.owned_blocks, kv.contiguous_blocks)
        contiguous = f"contiguous allocation at {kv.max_model_len} tokens ({kv.contiguous_blocks})"
        lines += [
            f"  empty      {100 * kv.internal_fragmentation:.1f}% of the owned slots ({slots})",
            f"  sharing    {kv.sharing_factor:.2f} tables a block ({kv.table_blocks} for {kv.owned_blocks})",
            f"  saving     {saving} against {contiguous}",
        ]
    lines.append(f"  sequences  {kv.running_sequences} running, {kv.waiting_sequences} waiting")
    parts = ["\n".join(lines)]
    if kv.block_map is not None:
        parts.append(_map(kv, running, letters))
    if sequences:
        parts.append(_sequences(sequences, letters, style))
    return "\n\n".join(parts)


def _map(kv: ExecutorKvState, running: Sequence[SequenceKvState], letters: Mapping[int, str]) -> str:
    assert kv.block_map is not None
    size = kv.block_map.blocks_per_cell
    holders: dict[int, Counter[str]] = {}
    for each in running:
        letter = letters.get(id(each), _NOT_LISTED)
        for block in each.block_ids:
            holders.setdefault((block - 1) // size, Counter())[letter] += 1
    signs = ""
    for index, use in enumerate(kv.block_map.cells):
        if use != "shared" and index in holders:
            # However few of the cell's blocks they are: the sequences are what is looked for.
            signs += holders[index].most_common(1)[0][0]
        else:
            signs += _NOT_LISTED if use == "owned" else _SIGNS[use]
    used = [f"{sign} {meaning}" for sign, meaning in _MEANINGS.items() if sign in signs]
    if any(sign in _LETTERS for sign in signs):
        used.insert(0, "letters: held by")
    what = "a block" if size == 1 else f"{size} blocks: who holds any of them, else what most of them are"
    rows = _rows(signs, size)
    caption = f"a character is {what} ({', '.join(used)})"
    return "\n".join([*textwrap.wrap(caption, 80, initial_indent="  ", subsequent_indent="  "), *rows])


def _rows(signs: str, size: int) -> list[str]:
    """Return the lines of a map, each with its first block; of many that are alike, the first and how many follow."""
    lines = [signs[start : start + MAP_WIDTH] for start in range(0, len(signs), MAP_WIDTH)]
    rows, at = [], 0
    for line, alike in itertools.groupby(lines):
        count = len(list(alike))
        told = count if count <= 2 else 1
        rows += [f"{(at + index) * MAP_WIDTH * size + 1:>10}  {line}" for index in range(told)]
        if told < count:
            rows.append(f"{'...':>10}  {counted(count - told, 'line')} more like this")
        at += count
    return rows


def _sequences(sequences: Sequence[SequenceKvState], letters: Mapping[int, str], style: Style) -> str:
    head = ["", "id", "state", "prompt", "output", "cached", "blocks", "age", "tenant"]
    rows = [
        [
            letters.get(id(each), ""),
            short_id(each.request_id) + (f"/{each.choice}" if each.choice else ""),
            each.state.value if each.wait_reason is None else each.wait_reason.value,
            str(each.prompt_tokens),
            str(each.completion_tokens),
            str(each.cached_tokens),
            str(each.blocks),
            duration(each.age),
            _cut(each.tenant),
        ]
        for each in sequences
    ]
    return table(head, rows, align="lllrrrrrl", style=style)


def short_id(request_id: str) -> str:
    """Return the end of an id, which is what tells one from another, and what `octavo cancel` takes."""
    prefix, dash, number = request_id.rpartition("-")
    return f"{prefix[-_KEPT_DIGITS:]}{dash}{number}"


def _cut(tenant: str) -> str:
    if not tenant:
        return "-"
    return tenant if len(tenant) <= _LONGEST_TENANT else tenant[: _LONGEST_TENANT - 2] + ".."
