"""The accounts of KV blocks, with either client of the operator's API."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from client_fakes import fail, reply, serving
from filled import fill

from octavo.client import (
    AdminClient,
    AsyncAdminClient,
    BlockMap,
    BlockUse,
    InvalidArgumentError,
    KvState,
    NotFoundError,
    RequestState,
    WaitReason,
)
from octavo.client.kv_convert import kv_state_from
from octavo.v1 import admin_pb2


@pytest.fixture(params=[AdminClient, AsyncAdminClient])
def admin(request: pytest.FixtureRequest) -> Any:
    """Make one call of the operator's API, with either client."""

    def call(address: str, method: str, *args: Any, **options: Any) -> Any:
        if request.param is AdminClient:
            with AdminClient(address) as client:
                return getattr(client, method)(*args, **options)

        async def call_async() -> Any:
            async with AsyncAdminClient(address) as client:
                return await getattr(client, method)(*args, **options)

        return asyncio.run(call_async())

    return call


def page(first: int, count: int, token: str = "") -> admin_pb2.GetKvStateResponse:
    """A page of sequences, by number."""
    sequences = [admin_pb2.SequenceKvState(choice=number) for number in range(first, first + count)]
    return admin_pb2.GetKvStateResponse(sequences=sequences, num_sequences=9, next_page_token=token)


def test_every_field_is_told(admin: Any) -> None:
    """Each field of ledger, map and sequence is a value under the same name; enums are words, ages seconds."""
    message = admin_pb2.GetKvStateResponse()
    fill(message)
    message.next_page_token = ""
    with serving(reply(message)) as gateway:
        state: KvState = admin(gateway.address, "get_kv_state")
    assert (state.term, state.num_sequences) == (message.term, message.num_sequences)
    for told, sent in ((state.executors[0], message.executors[0]), (state.sequences[0], message.sequences[0])):
        fields = {each.name: getattr(sent, each.name) for each in sent.DESCRIPTOR.fields}
        assert vars(told).keys() == fields.keys()
        plain = {name for name, value in fields.items() if isinstance(value, int | float | str)}
        for name in plain - {"state", "wait_reason"}:
            assert getattr(told, name) == fields[name], name
    size = message.executors[0].block_map.blocks_per_cell
    assert state.executors[0].block_map == BlockMap(size, (BlockUse.FREE,))
    sequence, sent = state.sequences[0], message.sequences[0]
    assert (sequence.state, sequence.wait_reason) == (RequestState.WAITING, WaitReason.BEHIND_OTHERS)
    assert sequence.block_ids == tuple(sent.block_ids)
    assert sequence.age == pytest.approx(sent.age.ToNanoseconds() / 1e9)


def test_words_of_the_contract_are_known_and_later_ones_are_unknown() -> None:
    """Every reason and use has a word of its own; one of a later version breaks no old client."""
    for enum, unspecified in ((admin_pb2.WaitReason, None), (admin_pb2.BlockUse, BlockUse.UNKNOWN)):
        told = []
        for number in (*enum.values(), 77):
            message = admin_pb2.GetKvStateResponse()
            message.sequences.add(wait_reason=number)
            message.executors.add().block_map.cells.append(number)
            state = kv_state_from([message], 1)
            block_map = state.executors[0].block_map
            assert block_map is not None
            told.append(state.sequences[0].wait_reason if enum is admin_pb2.WaitReason else block_map.cells[0])
        assert told[0] is unspecified
        assert told[-1] == "unknown"
        assert len(set(told[1:-1]) - {"unknown"}) == len(told) - 2
    empty = kv_state_from([admin_pb2.GetKvStateResponse(executors=[admin_pb2.ExecutorKvState()])], 1)
    assert empty.executors[0].block_map is None


def test_pages_are_read_up_to_the_limit(admin: Any) -> None:
    """Further pages are asked for while there are some and sequences lack; the map comes with the first one only."""
    with serving(reply(page(0, 4, "a"), page(4, 2, "b"))) as gateway:
        state = admin(gateway.address, "get_kv_state", "e:1", limit=6, block_ids=True, map_cells=8)
    assert [each.choice for each in state.sequences] == [0, 1, 2, 3, 4, 5]
    ask = admin_pb2.GetKvStateRequest
    assert gateway.requests == [
        ask(executor="e:1", page_size=6, block_ids=True, map_cells=8),
        ask(executor="e:1", page_size=2, page_token="a", block_ids=True),
    ]
    with serving(reply(page(0, 1000, "a"), page(1000, 3))) as gateway:
        assert len(admin(gateway.address, "get_kv_state", limit=5000).sequences) == 1003
    assert [each.page_size for each in gateway.requests] == [1000, 1000]
    with serving(reply(page(0, 1, "a"))) as gateway:
        state = admin(gateway.address, "get_kv_state", limit=0)
    assert (state.sequences, state.num_sequences) == ((), 9)


def test_flush_gives_the_count(admin: Any) -> None:
    """The executor travels, the freed blocks come back; an executor that is not there is NotFoundError."""
    with serving(reply(admin_pb2.FlushPrefixCacheResponse(freed_blocks=5))) as gateway:
        assert admin(gateway.address, "flush_prefix_cache", "e:1") == 5
    assert gateway.requests == [admin_pb2.FlushPrefixCacheRequest(executor="e:1")]
    refuse = fail(grpc.StatusCode.NOT_FOUND, "EXECUTOR_NOT_FOUND", "no executor at 'e:1'")
    with serving(refuse) as gateway, pytest.raises(NotFoundError, match="no executor at 'e:1'"):
        admin(gateway.address, "flush_prefix_cache", "e:1")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"limit": -1}, InvalidArgumentError, "limit: must be 0 or more, is -1"),
        ({"limit": 1.5}, TypeError, "limit takes a whole number, is 1.5"),
        ({"map_cells": 4097}, InvalidArgumentError, "map_cells: must be 0 to 4096, is 4097"),
        ({"executor": 5}, TypeError, "executor must be text, is int"),
        ({"executor": "\ud800"}, InvalidArgumentError, "executor: must be host:port"),
    ],
)
def test_what_cannot_be_asked_is_named(options: dict[str, Any], error: type[Exception], words: str) -> None:
    """A bad argument is an error with its name, before anything is sent."""
    with AdminClient("127.0.0.1:1") as client, pytest.raises(error, match=words):
        client.get_kv_state(**options)
