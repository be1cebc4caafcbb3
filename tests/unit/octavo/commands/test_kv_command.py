"""`octavo kv` against a scripted operator's API: what a person reads of the accounts, and the flush."""

from __future__ import annotations

import json

import pytest
from fake_gateway import FakeGateway
from google.protobuf.duration_pb2 import Duration

from octavo.cli import main
from octavo.v1 import admin_pb2

CELL = "0123456789abcdef" * 2
FREE, CACHED, OWNED, SHARED, PINNED = range(1, 6)


def sequence(number: int, *blocks: int, **fields: object) -> admin_pb2.SequenceKvState:
    """A sequence that runs on h:1."""
    values: dict[str, object] = {
        "request_id": f"{CELL}-{number}",
        "executor": "h:1",
        "state": admin_pb2.REQUEST_STATE_RUNNING,
        "blocks": len(blocks),
        "block_ids": blocks,
        "age": Duration(seconds=65),
    }
    return admin_pb2.SequenceKvState(**values | fields)  # type: ignore[arg-type]


def executor(cells: list[int], size: int = 1, **fields: object) -> admin_pb2.ExecutorKvState:
    """The ledger of h:1 with its map."""
    block_map = admin_pb2.BlockMap(blocks_per_cell=size, cells=cells)  # type: ignore[arg-type]
    return admin_pb2.ExecutorKvState(address="h:1", model="m", block_size=16, block_map=block_map, **fields)  # type: ignore[arg-type]


def shown(gateway: FakeGateway, capsys: pytest.CaptureFixture[str], *flags: str) -> list[str]:
    """Run the command and return its lines, which fit on the narrowest of screens and hold no colour."""
    assert main(["kv", *flags, "--address", gateway.admin_address]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert all(line.isascii() and line.isprintable() for line in lines)
    return lines


def test_a_ledger_its_map_and_its_sequences(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """Each number has its words, each block its holder's letter, each sequence what it holds or why it does not."""
    ledger = executor(
        [OWNED, SHARED, OWNED, FREE, CACHED, OWNED, PINNED, FREE],
        total_blocks=8,
        free_blocks=2,
        owned_blocks=4,
        cached_blocks=1,
        pinned_blocks=1,
        reserved_blocks=1,
        filled_slots=56,
        pending_slots=2,
        internal_fragmentation=0.125,
        table_blocks=5,
        sharing_factor=1.25,
        max_model_len=64,
        contiguous_blocks=8,
        contiguous_saving=0.5,
        running_sequences=3,
        waiting_sequences=1,
    )
    waiting = {"state": admin_pb2.REQUEST_STATE_WAITING, "wait_reason": admin_pb2.WAIT_REASON_NO_FREE_BLOCKS}
    gateway.kv_state = admin_pb2.GetKvStateResponse(
        executors=[ledger],
        sequences=[
            sequence(7, 1, 2, prompt_tokens=20, completion_tokens=3, cached_tokens=16, tenant="a-long-tenant"),
            sequence(7, 2, 6, choice=1),
            sequence(123, **waiting),
            sequence(124, executor="", state=2, wait_reason=admin_pb2.WAIT_REASON_NO_EXECUTOR),
        ],
        num_sequences=6,
    )
    assert shown(gateway, capsys) == [
        "h:1  m, blocks of 16 tokens",
        "  blocks     8 = 2 free + 4 owned + 1 cached + 1 pinned",
        "  reserved   1, kept for short newcomers",
        "  empty      12.5% of the owned slots (8 of 64; 2 are filled next)",
        "  sharing    1.25 tables a block (5 for 4)",
        "  saving     50% against contiguous allocation at 64 tokens (8)",
        "  sequences  3 running, 1 waiting",
        "",
        "  a character is a block (letters: held by, . free, = cached, + held by several,",
        "  ! pinned, # held, not listed)",
        "         1  A+#.=B!.",
        "",
        "   id        state           prompt  output  cached  blocks    age  tenant",
        "A  cdef-7    running             20       3      16       2  1m05s  a-long..",
        "B  cdef-7/1  running              0       0       0       2  1m05s  -",
        "   cdef-123  no free blocks       0       0       0       0  1m05s  -",
        "",
        "on no executor",
        "",
        "  id        state        prompt  output  cached  blocks    age  tenant",
        "  cdef-124  no executor       0       0       0       0  1m05s  -",
        "",
        "4 of 6 sequences listed; --limit N lists more",
    ]
    (asked,) = gateway.kv_requests
    assert (asked.executor, asked.page_size, asked.block_ids, asked.map_cells) == ("", 20, True, 1024)


def test_a_large_ledger_is_drawn_in_cells(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """A cell bears the letter of who holds most of what is held of it, a line begins with its first block, lines that
    are alike are told once, and numbers may be large.
    """
    ledger = executor(
        [OWNED] * 2 + [FREE] * 1022,
        size=100,
        total_blocks=102_400,
        free_blocks=102_150,
        owned_blocks=250,
        filled_slots=3990,
        table_blocks=250,
        sharing_factor=1,
        max_model_len=131_072,
        contiguous_blocks=16_384,
    )
    first, second = range(1, 151), range(151, 251)
    gateway.kv_state = admin_pb2.GetKvStateResponse(
        executors=[ledger], sequences=[sequence(1, *first), sequence(2, *second)]
    )
    lines = shown(gateway, capsys)
    caption = lines.index("  a character is 100 blocks: who holds any of them, else what most of them are")
    assert lines[caption + 1 : caption + 5] == [
        "  (letters: held by, . free)",
        f"         1  AAB{'.' * 61}",
        f"      6401  {'.' * 64}",
        "       ...  14 lines more like this",
    ]


def test_a_sequence_of_few_blocks_is_seen_in_a_large_ledger(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a cell is a hundred blocks and most of them are free or cached, who holds one of them is shown there."""
    ledger = executor([FREE, CACHED, SHARED] + [FREE] * 61, size=100, total_blocks=6400, owned_blocks=14)
    gateway.kv_state = admin_pb2.GetKvStateResponse(
        executors=[ledger], sequences=[sequence(1, *range(1, 14)), sequence(2, 150), sequence(3, 250)]
    )
    (row,) = [line for line in shown(gateway, capsys) if line.endswith("." * 61)]
    assert row == f"         1  AB+{'.' * 61}"


def test_many_sequences_run_out_of_letters(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """The fifty-third and later have none: their blocks are held, and no letter stands for two."""
    gateway.kv_state = admin_pb2.GetKvStateResponse(
        executors=[executor([OWNED] * 54, total_blocks=54, owned_blocks=54)],
        sequences=[sequence(number, number) for number in range(1, 55)],
    )
    (row,) = [line for line in shown(gateway, capsys, "--limit", "60") if line.endswith("##")]
    letters = row.split()[1][:-2]
    assert letters.isalpha()
    assert len(letters) == len(set(letters)) == 52


def test_an_idle_executor_and_none(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is divided by nothing; a cell without executors says so."""
    gateway.kv_state = admin_pb2.GetKvStateResponse(
        executors=[executor([FREE] * 3, total_blocks=3, free_blocks=3, max_model_len=49)]
    )
    assert shown(gateway, capsys)[1:] == [
        "  blocks     3 = 3 free + 0 owned + 0 cached + 0 pinned",
        "  reserved   0, kept for short newcomers",
        "  sequences  0 running, 0 waiting",
        "",
        "  a character is a block (. free)",
        "         1  ...",
    ]
    gateway.kv_state = admin_pb2.GetKvStateResponse()
    assert shown(gateway, capsys, "--executor", "h:1", "--limit", "0") == ["no executor is ready"]
    assert gateway.kv_requests[-1].executor == "h:1"


def test_json_has_every_value(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """What programs read: the client's own values, enums as words, ids of blocks as numbers."""
    gateway.kv_state = admin_pb2.GetKvStateResponse(
        term=4, executors=[executor([OWNED, FREE], total_blocks=2)], sequences=[sequence(1, 1)], num_sequences=1
    )
    told = json.loads("\n".join(shown(gateway, capsys, "--json")))
    assert (told["term"], told["num_sequences"]) == (4, 1)
    assert told["executors"][0]["block_map"] == {"blocks_per_cell": 1, "cells": ["owned", "free"]}
    (listed,) = told["sequences"]
    assert (listed["state"], listed["wait_reason"], listed["block_ids"], listed["age"]) == ("running", None, [1], 65.0)


def test_flush(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """It flushes one cache or all, says what became free, and shows nothing."""
    assert shown(gateway, capsys, "--flush") == ["freed 1 cached block"]
    assert json.loads("".join(shown(gateway, capsys, "--flush", "--json", "--executor", "h:1"))) == {"freed_blocks": 1}
    assert gateway.flushed == ["", "h:1"]
    assert gateway.kv_requests == []
