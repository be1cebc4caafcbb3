"""The accounts of KV blocks of a whole cell: live numbers, a flush that makes a prompt cold, the command."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from stack import TIMEOUT, Stack, in_process, processes, wait_idle
from stack_client import generate, request_for
from test_admin import operator_at, streams

import octavo
from octavo.client import ExecutorKvState, KvState, RequestState, WaitReason
from octavo.models.prepared import PreparedModel

PROMPT = [*range(5, 55)]
"""Three full blocks and two tokens."""


def check_ledger(kv: ExecutorKvState) -> None:
    """Raise AssertionError unless the parts of a ledger are its whole."""
    assert kv.free_blocks + kv.owned_blocks + kv.cached_blocks + kv.pinned_blocks == kv.total_blocks
    assert kv.reserved_blocks <= kv.free_blocks + kv.cached_blocks
    num_slots = kv.owned_blocks * kv.block_size
    assert kv.filled_slots + kv.pending_slots <= num_slots
    if kv.owned_blocks:
        assert kv.internal_fragmentation == pytest.approx(1 - kv.filled_slots / num_slots)
        assert kv.sharing_factor == pytest.approx(kv.table_blocks / kv.owned_blocks)
        assert kv.contiguous_saving == pytest.approx(1 - kv.owned_blocks / kv.contiguous_blocks)
    assert kv.block_map is None or kv.block_map.cells.count("free") == kv.free_blocks


async def state_once(operator: octavo.AsyncAdminClient, num_running: int) -> KvState:
    """Ask until so many sequences run and each has a token."""
    async with asyncio.timeout(TIMEOUT):
        while True:
            state = await operator.get_kv_state(block_ids=True, map_cells=4096)
            running = [each for each in state.sequences if each.state is RequestState.RUNNING]
            if len(running) == num_running and all(each.completion_tokens for each in running):
                return state
            await asyncio.sleep(0.01)


@pytest.mark.asyncio
async def test_live_numbers_agree_with_one_another(stack: Stack) -> None:
    """While streams run, ledger, sequences, requests and load tell of the same blocks; then nothing is owned."""
    async with (
        octavo.AsyncAdminClient(stack.admin_address) as operator,
        streams(stack.gateway_address, ["a", "b"], n=2),
    ):
        state = await state_once(operator, 4)
        (kv,) = state.executors
        check_ledger(kv)
        assert kv.block_map is not None
        held = {block for each in state.sequences for block in each.block_ids}
        assert (kv.owned_blocks, kv.running_sequences, state.num_sequences) == (len(held), 4, 4)
        assert {index for index, use in enumerate(kv.block_map.cells, 1) if use in ("owned", "shared")} == held
        assert [(each.label, each.choice) for each in state.sequences] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
        assert all(each.wait_reason is None and each.executor == kv.address for each in state.sequences)
        for later in [await operator.get_kv_state() for _ in range(20)]:
            check_ledger(later.executors[0])
        for request in await operator.list_requests():
            assert (request.wait_reason, request.preemptions) == (None, 0)
        (load,) = (await operator.get_load()).executors
        assert load.owned_blocks >= kv.owned_blocks
        assert load.free_blocks + load.owned_blocks + load.cached_blocks + load.pinned_blocks == load.total_blocks
    await wait_idle(stack)
    async with octavo.AsyncAdminClient(stack.admin_address) as operator:
        (kv,) = (await operator.get_kv_state()).executors
        check_ledger(kv)
        assert (kv.owned_blocks, kv.sharing_factor, kv.internal_fragmentation) == (0, 0, 0)


@pytest.mark.asyncio
async def test_a_flush_makes_the_same_prompt_cold(stack: Stack) -> None:
    """A prompt computed before comes from the cache; after a flush it is computed again, to the same output."""
    request = request_for(PROMPT, 8, seed=1)
    async with octavo.AsyncAdminClient(stack.admin_address) as operator:
        await operator.flush_prefix_cache()
        assert [each.cached_blocks for each in (await operator.get_kv_state()).executors] == [0]
        cold = await generate(stack, request)
        await wait_idle(stack)
        (kv,) = (await operator.get_kv_state()).executors
        assert kv.cached_blocks >= 3
        hits = [await cached_tokens_of(stack, operator)]
        assert await operator.flush_prefix_cache() >= 3
        assert [each.cached_blocks for each in (await operator.get_kv_state()).executors] == [0]
        hits.append(await cached_tokens_of(stack, operator))
        assert hits == [48, 0]
        again = await generate(stack, request)
        assert [each.token_ids for each in again.choices] == [each.token_ids for each in cold.choices]
        await wait_idle(stack)


async def cached_tokens_of(stack: Stack, operator: octavo.AsyncAdminClient) -> int:
    """Run the prompt for a while, and return how many of its tokens the operator sees taken from the cache."""
    request = request_for(PROMPT, 100_000, ignore_eos=True)
    running = asyncio.create_task(generate(stack, request))
    try:
        (sequence,) = (await state_once(operator, 1)).sequences
        (listed,) = await operator.list_requests()
        assert listed.cached_tokens == sequence.cached_tokens
        await operator.cancel_request(listed.request_id)
        with pytest.raises(Exception, match="operator"):
            await running
    finally:
        running.cancel()
    await wait_idle(stack)
    return sequence.cached_tokens


@pytest.mark.asyncio
async def test_who_waits_is_told_why(tiny_model: PreparedModel) -> None:
    """Where one row is all there is, the second request lacks one and the third waits behind it, in both lists."""
    async with (
        in_process(tiny_model, flags={"max_num_seqs": "1"}) as stack,
        octavo.AsyncAdminClient(stack.admin_address) as operator,
        operator_at(stack.admin_address),
        streams(stack.gateway_address, ["first", "second", "third"]),
    ):
        state = await state_once(operator, 1)
        reasons = [None, WaitReason.NO_FREE_ROW, WaitReason.BEHIND_OTHERS]
        assert [each.wait_reason for each in state.sequences] == reasons
        assert [each.wait_reason for each in await operator.list_requests()] == reasons
        (kv,) = state.executors
        assert (kv.running_sequences, kv.waiting_sequences) == (1, 2)
        alone = await operator.get_kv_state(kv.address, limit=1)
        assert [each.label for each in alone.sequences] == ["first"]
        assert (alone.num_sequences, len(alone.executors)) == (3, 1)
        with pytest.raises(octavo.NotFoundError):
            await operator.get_kv_state("127.0.0.1:1")


@pytest.mark.asyncio
async def test_the_command_and_the_log_of_a_cell_of_processes(tiny_model: PreparedModel, tmp_path: Path) -> None:
    """`octavo kv` shows who holds what in 80 columns, `--flush` empties the cache, and the scheduler logs the same."""
    flags = {"log_memory_usage": "0.05", "log_level": "info"}

    async def kv(*arguments: str) -> str:
        command = [sys.executable, "-m", "octavo", "kv", "--address", stack.admin_address, *arguments]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
        done = await asyncio.to_thread(
            subprocess.run, command, env=environ, capture_output=True, text=True, timeout=TIMEOUT
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    async with processes(tiny_model, tmp_path, flags=flags) as stack:
        async with (
            octavo.AsyncAdminClient(stack.admin_address) as operator,
            streams(stack.gateway_address, ["a"], max_tokens=100_000),
        ):
            await state_once(operator, 1)
            lines = (await kv()).splitlines()
            assert max(map(len, lines)) <= 80
            (total,) = [line for line in lines if line.startswith("  blocks ")]
            assert "1 running, 0 waiting" in "\n".join(lines)
            assert any(line.startswith("A  ") and " running " in line for line in lines)
            told = json.loads(await kv("--json"))
            (executor,) = told["executors"]
            assert total.split()[1] == str(executor["total_blocks"])
            assert executor["owned_blocks"] == len(told["sequences"][0]["block_ids"]) > 0
        await wait_idle(stack)
        assert (await kv("--flush")).startswith("freed ")
        assert json.loads(await kv("--json"))["executors"][0]["cached_blocks"] == 0
        logged: list[dict[str, object]] = []
        async with asyncio.timeout(TIMEOUT):
            while not logged or logged[-1]["free_blocks"] != logged[-1]["total_blocks"]:
                lines = [json.loads(line) for line in stack.log_of("scheduler").splitlines() if "memory usage" in line]
                logged = [executor for line in lines for executor in line["executors"]]
                await asyncio.sleep(0.01)
        assert any(each["owned_blocks"] for each in logged)
        for each in logged:
            parts = [each[f"{state}_blocks"] for state in ("free", "owned", "cached", "pinned")]
            assert sum(parts) == each["total_blocks"]  # type: ignore[arg-type]
