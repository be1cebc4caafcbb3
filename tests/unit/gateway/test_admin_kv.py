"""The accounts of KV blocks on their way from the scheduler to operators: every field, and what is asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from filled import fill
from gateway_fakes import TIMEOUT, FakeScheduler, Stack, running_stack
from google.protobuf.message import Message

from gateway import admin_convert
from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.models.prepared import PreparedModel
from octavo.rpc.errors import from_rpc_error
from octavo.v1 import admin_pb2

RENAMED = {
    "num_running": "running_sequences",
    "num_waiting": "waiting_sequences",
    "num_prompt_tokens": "prompt_tokens",
    "num_output_tokens": "completion_tokens",
    "num_computed_tokens": "computed_tokens",
    "num_cached_tokens": "cached_tokens",
    "num_blocks": "blocks",
    "num_shared_blocks": "shared_blocks",
    "num_preemptions": "preemptions",
}


@pytest_asyncio.fixture
async def stack(prepared: PreparedModel) -> AsyncIterator[Stack]:
    """A gateway whose scheduler sends nothing by itself."""
    async with running_stack(prepared, FakeScheduler(auto=False)) as running:
        await running.wait_health(True, admin=True)
        yield running


def public(message: Message) -> dict[str, object]:
    """Return the fields of an internal message by their public names."""
    fields = {each.name: getattr(message, each.name) for each in message.DESCRIPTOR.fields}
    return {RENAMED.get(name, name): value for name, value in fields.items()}


@pytest.mark.asyncio
async def test_the_accounts_are_told_in_every_field(stack: Stack) -> None:
    """Ledger, map and sequences come under the public names, none left out, a sequence under its public id."""
    state = scheduler_pb2.GetKvStateResponse()
    fill(state)
    sequence = state.sequences[0]
    sequence.gateway, sequence.request = "ab" * 16, 7
    stack.scheduler.kv_state = state
    answer = await stack.admin.GetKvState(admin_pb2.GetKvStateRequest(), timeout=TIMEOUT)
    assert (answer.term, answer.num_sequences) == (state.term, state.num_sequences)
    assert answer.next_page_token == state.next_page_token
    wanted = public(state.executors[0]) | {"block_map": answer.executors[0].block_map}
    assert {each.name: getattr(answer.executors[0], each.name) for each in wanted_fields("ExecutorKvState")} == wanted
    told, inner = answer.executors[0].block_map, state.executors[0].block_map
    assert (told.blocks_per_cell, list(told.cells)) == (inner.blocks_per_cell, list(inner.cells))
    wanted = public(sequence) | {"request_id": f"{'ab' * 16}-7", "state": admin_pb2.REQUEST_STATE_RUNNING}
    for inner_name in ("gateway", "request", "is_running"):
        del wanted[inner_name]
    assert {each.name: getattr(answer.sequences[0], each.name) for each in wanted_fields("SequenceKvState")} == wanted


def wanted_fields(name: str) -> list[object]:
    """Return the fields of a public message."""
    return list(admin_pb2.DESCRIPTOR.message_types_by_name[name].fields)


@pytest.mark.asyncio
async def test_what_runs_has_no_reason_and_no_map_is_none(stack: Stack) -> None:
    """A sequence that waits is told as such with its reason; a map that was not asked for is not there."""
    stack.scheduler.kv_state = scheduler_pb2.GetKvStateResponse(
        executors=[scheduler_pb2.ExecutorKvState(address="a:1")],
        sequences=[
            scheduler_pb2.SequenceKvState(wait_reason=scheduler_pb2.WAIT_REASON_KEPT_APART),
            scheduler_pb2.SequenceKvState(is_running=True),
        ],
    )
    answer = await stack.admin.GetKvState(admin_pb2.GetKvStateRequest(), timeout=TIMEOUT)
    assert not answer.executors[0].HasField("block_map")
    states = [(each.state, each.wait_reason) for each in answer.sequences]
    assert states == [
        (admin_pb2.REQUEST_STATE_WAITING, admin_pb2.WAIT_REASON_KEPT_APART),
        (admin_pb2.REQUEST_STATE_RUNNING, admin_pb2.WAIT_REASON_UNSPECIFIED),
    ]


@pytest.mark.asyncio
async def test_what_is_asked_for_is_passed_on(stack: Stack) -> None:
    """Executor, page and map go to the scheduler as they are; without a size a page has a hundred."""
    request = admin_pb2.GetKvStateRequest(executor="a:1", page_size=3, page_token="t", block_ids=True, map_cells=9)
    await stack.admin.GetKvState(request, timeout=TIMEOUT)
    await stack.admin.GetKvState(admin_pb2.GetKvStateRequest(), timeout=TIMEOUT)
    assert [asked for asked, _ in stack.scheduler.asked] == [
        scheduler_pb2.GetKvStateRequest(executor="a:1", page_size=3, page_token="t", block_ids=True, map_cells=9),
        scheduler_pb2.GetKvStateRequest(page_size=100),
    ]


@pytest.mark.asyncio
async def test_flush_tells_how_many_blocks_became_free(stack: Stack) -> None:
    """The executor is passed on, and so are the scheduler's count and its refusal."""
    answer = await stack.admin.FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest(executor="a:1"), timeout=TIMEOUT)
    assert answer.freed_blocks == 7
    ((asked, _),) = stack.scheduler.asked
    assert asked == scheduler_pb2.FlushPrefixCacheRequest(executor="a:1")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stack.admin.FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest(executor="unknown"), timeout=TIMEOUT)
    error = from_rpc_error(raised.value)
    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "EXECUTOR_NOT_FOUND")


@pytest.mark.parametrize("name", ["WaitReason", "BlockUse"])
def test_both_contracts_have_the_same_words(name: str) -> None:
    """Each reason and each use has the same name and number on both sides of the gateway, and is passed on."""
    public_words, internal_words = (
        {each.name: each.number for each in module.DESCRIPTOR.enum_types_by_name[name].values}
        for module in (admin_pb2, scheduler_pb2)
    )
    assert public_words == internal_words
    for number in set(internal_words.values()) - {0}:
        state = scheduler_pb2.GetKvStateResponse(
            executors=[scheduler_pb2.ExecutorKvState(block_map={"cells": [number] if name == "BlockUse" else []})],
            sequences=[scheduler_pb2.SequenceKvState(wait_reason=number if name == "WaitReason" else 0)],  # type: ignore[arg-type]
        )
        told = admin_convert.kv_state_to_proto(state)
        assert [*told.executors[0].block_map.cells, told.sequences[0].wait_reason][0] == number
