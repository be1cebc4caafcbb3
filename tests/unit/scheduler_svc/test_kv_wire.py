"""The accounts of KV blocks and the flush, asked of a scheduler over real channels."""

from __future__ import annotations

from collections.abc import Iterable

import grpc
import grpc.aio
import pytest
from wire_executor import MODEL, FakeExecutor
from wire_gateway import FakeGateway
from wire_scheduler import running_scheduler

from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.rpc.errors import ServiceError, from_rpc_error
from scheduler_svc.kv_views import BlockUse, WaitReason

PROMPT = list(range(1, 11))


async def ask(asking: FakeGateway, **fields: object) -> scheduler_pb2.GetKvStateResponse:
    """Ask for the accounts."""
    request = scheduler_pb2.GetKvStateRequest(**{"page_size": 100} | fields)  # type: ignore[arg-type]
    response: scheduler_pb2.GetKvStateResponse = await asking.stub.GetKvState(request)
    return response


async def refusal(call: object) -> ServiceError:
    """Return the error of a call that must be refused."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call  # type: ignore[misc]
    return from_rpc_error(raised.value)


def fields_of(errors: ServiceError) -> list[str]:
    """Return the fields that an error names."""
    return [violation.field for violation in errors.violations]


@pytest.mark.asyncio
async def test_a_cell_accounts_for_every_block() -> None:
    """While requests run and wait, ledger, map, sequences and GetLoad tell one story; when all is over it is empty."""
    executor = FakeExecutor(num_blocks=40, max_num_seqs=2)
    async with running_scheduler(executor) as scheduler:
        gateway = await scheduler.ready_gateway()
        executor.hold()
        await gateway.submit(1, PROMPT, 60, seed=1, label="mine", tenant="acme")
        for counter in (2, 3, 4):
            await gateway.submit(counter, [counter] * 9, 60, seed=counter)
        while (load := await gateway.load()).num_running < 2 or load.num_requests < 4:
            executor.permit(1)
        state = await ask(gateway, block_ids=True, map_cells=4096)
        [kv] = state.executors
        assert (kv.address, kv.model, kv.total_blocks, kv.pinned_blocks) == (executor.address, MODEL, 39, 0)
        assert kv.free_blocks + kv.owned_blocks + kv.cached_blocks + kv.pinned_blocks == kv.total_blocks
        assert (kv.num_running, kv.num_waiting, state.num_sequences) == (2, 2, 4)
        assert [(each.request, each.is_running, each.wait_reason) for each in state.sequences] == [
            (1, True, scheduler_pb2.WAIT_REASON_UNSPECIFIED),
            (2, True, scheduler_pb2.WAIT_REASON_UNSPECIFIED),
            (3, False, scheduler_pb2.WAIT_REASON_NO_FREE_ROW),
            (4, False, scheduler_pb2.WAIT_REASON_BEHIND_OTHERS),
        ]
        first = state.sequences[0]
        assert (first.gateway, first.label, first.tenant, first.executor) == (
            gateway.incarnation,
            "mine",
            "acme",
            executor.address,
        )
        assert first.age.ToNanoseconds() > 0
        held = [block for each in state.sequences for block in each.block_ids]
        assert len(held) == sum(each.num_blocks for each in state.sequences) == kv.table_blocks
        assert len(set(held)) == kv.owned_blocks
        cells = list(kv.block_map.cells)
        assert [block for block, use in enumerate(cells, 1) if use >= scheduler_pb2.BLOCK_USE_OWNED] == sorted(
            set(held)
        )
        listed = await gateway.stub.ListRequests(scheduler_pb2.ListRequestsRequest(page_size=9))
        assert [each.wait_reason for each in listed.requests] == [each.wait_reason for each in state.sequences]
        [load] = (await gateway.load()).executors
        ledger = (kv.total_blocks, kv.free_blocks, kv.owned_blocks, kv.cached_blocks, kv.num_running, kv.num_waiting)
        assert ledger == (
            load.total_blocks,
            load.free_blocks,
            load.owned_blocks,
            load.cached_blocks,
            load.num_running,
            load.num_waiting,
        )
        executor.release()
        for counter in (1, 2, 3, 4):
            await gateway.cancel(counter)
        await gateway.until_load(lambda load: load.num_requests == 0 and load.executors[0].num_in_flight == 0)
        state = await ask(gateway)
        assert (state.num_sequences, list(state.sequences), state.next_page_token) == (0, [], "")
        [kv] = state.executors
        assert (kv.owned_blocks, kv.table_blocks, kv.sharing_factor, kv.contiguous_saving) == (0, 0, 0, 0)
        assert not kv.HasField("block_map")


@pytest.mark.asyncio
async def test_pages_hold_every_choice_once() -> None:
    """Page after page, each choice of each request comes once, whatever the size; tokens are of this list alone."""
    executor = FakeExecutor()
    async with running_scheduler(executor) as scheduler:
        gateway = await scheduler.ready_gateway()
        executor.hold()
        for counter in range(1, 6):
            await gateway.submit(counter, [counter] * 3, 60, n=3)
        await gateway.until_load(lambda load: load.num_requests == 5)
        for size in (1, 2, 4, 100):
            found, token = [], None
            while token != "":
                page = await ask(gateway, page_size=size, page_token=token or "")
                assert len(page.sequences) <= size
                assert len(page.executors) == 1
                found += [(each.request, each.choice) for each in page.sequences]
                token = page.next_page_token
            assert found == [(counter, choice) for counter in range(1, 6) for choice in range(3)]
        kv_token = (await ask(gateway, page_size=1)).next_page_token
        page = await gateway.stub.ListRequests(scheduler_pb2.ListRequestsRequest(page_size=1))
        strange = scheduler_pb2.ListRequestsRequest(page_size=1, page_token=kv_token)
        assert fields_of(await refusal(gateway.stub.ListRequests(strange))) == ["page_token"]
        for token in (page.next_page_token, kv_token[:-4], "x"):
            assert fields_of(await refusal(ask(gateway, page_token=token))) == ["page_token"]
        executor.release()


@pytest.mark.asyncio
async def test_what_makes_no_sense_is_refused_by_its_fields() -> None:
    """Pages and maps beyond the limits are INVALID_ARGUMENT, executors without a session NOT_FOUND, for both rpcs."""
    async with running_scheduler(FakeExecutor()) as scheduler:
        gateway = await scheduler.ready_gateway()
        error = await refusal(ask(gateway, page_size=0, map_cells=4097, page_token="x"))
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert fields_of(error) == ["page_size", "map_cells", "page_token"]
        assert fields_of(await refusal(ask(gateway, page_size=1001))) == ["page_size"]
        flush = gateway.stub.FlushPrefixCache(scheduler_pb2.FlushPrefixCacheRequest(executor="e:1"))
        for call in (ask(gateway, executor="e:1"), flush):
            error = await refusal(call)
            assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "EXECUTOR_NOT_FOUND")
            assert error.metadata == {"executor": "e:1"}


@pytest.mark.asyncio
async def test_a_flush_frees_what_is_cached_where_it_is_asked_to() -> None:
    """Of two executors one is flushed alone, then the rest; each time the count is what GetKvState had as cached."""
    executors = [FakeExecutor(), FakeExecutor()]
    async with running_scheduler(*executors) as scheduler:
        gateway = await scheduler.ready_gateway(2)
        for counter in range(1, 9):
            await gateway.submit(counter, [counter] * 9, 12, seed=counter)
        await gateway.over(*range(1, 9))
        await gateway.until_load(lambda load: all(each.num_in_flight == 0 for each in load.executors))
        cached = {each.address: each.cached_blocks for each in (await ask(gateway)).executors}
        assert all(cached.values())
        first, second = cached
        for address, others in ((first, {second: cached[second]}), ("", {})):
            freed = sum(cached.values()) - sum(others.values())
            answer = await gateway.stub.FlushPrefixCache(scheduler_pb2.FlushPrefixCacheRequest(executor=address))
            assert answer.num_freed_blocks == freed > 0
            cached = {each.address: each.cached_blocks for each in (await ask(gateway)).executors}
            assert {address: count for address, count in cached.items() if count} == others
        assert all(each.free_blocks == each.total_blocks for each in (await ask(gateway)).executors)


@pytest.mark.parametrize(("words", "contract"), [(WaitReason, "WaitReason"), (BlockUse, "BlockUse")])
def test_the_contract_has_each_word(words: Iterable[WaitReason | BlockUse], contract: str) -> None:
    """The domain's reasons and uses are those of the contract, but for the one that is never sent."""
    prefix = {"WaitReason": "WAIT_REASON_", "BlockUse": "BLOCK_USE_"}[contract]
    names = scheduler_pb2.DESCRIPTOR.enum_types_by_name[contract].values_by_name
    assert {f"{prefix}{word.name}" for word in words} == set(names) - {f"{prefix}UNSPECIFIED"}
