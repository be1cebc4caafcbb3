"""`octavo bench` against whole cells: its gRPC target, and the command as a person runs it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from stack import TIMEOUT, ProcessStack, Stack, get_load, in_process, wait_idle, wait_serving

from octavo.bench.grpc_client import GrpcTarget
from octavo.bench.records import BenchError, BenchRequest, Record, RequestFailed
from octavo.bench.target import GenerationOptions
from octavo.models.prepared import PreparedModel

LONG = 1500


@contextlib.asynccontextmanager
async def target_of(stack: Stack, count: int = 1, **options: object) -> AsyncIterator[GrpcTarget]:
    """A target that has looked at the cell, over `count` connections."""
    target = GrpcTarget([stack.gateway_address] * count, GenerationOptions(**options), time.perf_counter)  # type: ignore[arg-type]
    try:
        yield target
    finally:
        await target.close()


async def stream(target: GrpcTarget, prompt: str | list[int], max_tokens: int, index: int = 0) -> Record:
    """Send one request."""
    record = Record(index, max_tokens, scheduled=0.0, sent=0.0)
    async with asyncio.timeout(TIMEOUT):
        await target.stream(BenchRequest(prompt, max_tokens), record)
    return record


@pytest.mark.asyncio
async def test_the_counts_are_the_servers(stack: Stack) -> None:
    """Exact input and output tokens, every token stamped once, in order; two connections take turns."""
    async with target_of(stack, count=2) as target:
        info = await target.describe()
        assert (info.protocol, info.model, info.revision) == ("grpc", stack.model.name, stack.model.revision)
        for index in range(3):
            record = await stream(target, [5, 6, 7, 8], 12, index)
            assert (record.prompt_tokens, record.output_tokens, record.is_counted_by_server) == (4, 12, True)
            assert sum(record.delta_tokens) == 12
            assert len(record.stamps) == len(record.delta_tokens)
            assert record.stamps == sorted(record.stamps)


@pytest.mark.asyncio
async def test_text_and_chats_are_tokenized_by_the_server(stack: Stack) -> None:
    """Ids come from the gateway's tokenizer and are taken as prompts; a chat has text alone, template counted."""
    async with target_of(stack) as target:
        token_ids = await target.encode("the end of the story")
        assert token_ids is not None
        assert (await stream(target, list(token_ids), 2)).prompt_tokens == len(token_ids)
        plain = (await stream(target, "the end of the story", 2)).prompt_tokens
    async with target_of(stack, is_chat=True) as chat:
        await chat.describe()
        assert await chat.encode("the end of the story") is None
        counted = await chat.count_tokens("the end of the story")
        assert (await stream(chat, "the end of the story", 2)).prompt_tokens == counted
    assert plain is not None
    assert counted is not None
    assert counted > plain == len(token_ids)


@pytest.mark.asyncio
async def test_a_refused_request_is_a_failure_with_the_servers_code(stack: Stack) -> None:
    """A token outside the vocabulary is INVALID_ARGUMENT; a request that takes too long, DEADLINE_EXCEEDED."""
    async with target_of(stack) as target:
        with pytest.raises(RequestFailed) as failed:
            await stream(target, [1_000_000], 4)
        assert failed.value.status == "INVALID_ARGUMENT"
        assert "INVALID_REQUEST: token_ids" in failed.value.message
    async with target_of(stack, timeout=0.3) as hasty:
        with pytest.raises(RequestFailed) as failed:
            await stream(hasty, [5, 6], LONG)
        assert failed.value.status == "DEADLINE_EXCEEDED"
    await wait_idle(stack)


@pytest.mark.asyncio
async def test_cancelling_a_reader_frees_the_servers_memory(stack: Stack) -> None:
    """The call itself is cancelled, not only the task that reads it: the cell is idle soon after."""
    async with target_of(stack) as target:
        record = Record(0, LONG, scheduled=0.0, sent=0.0)
        reading = asyncio.create_task(target.stream(BenchRequest([5, 6], LONG), record))
        async with asyncio.timeout(TIMEOUT):
            while not record.stamps:
                await asyncio.sleep(0.001)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await wait_idle(stack)
        assert 0 < record.output_tokens < LONG


@pytest.mark.asyncio
async def test_what_cannot_be_measured_is_said_at_the_first_look(stack: Stack) -> None:
    """A model that is not served is answered with those that are."""
    async with target_of(stack, model="other") as target:
        with pytest.raises(BenchError, match=f"--model: {stack.gateway_address} serves {stack.model.name}: name one"):
            await target.describe()


async def start(stack: Stack, *flags: str) -> asyncio.subprocess.Process:
    """Start the command against a cell."""
    command = [sys.executable, "-m", "octavo", "bench", "--address", stack.gateway_address, *flags]
    return await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


async def finish(process: asyncio.subprocess.Process) -> tuple[int | None, str, str]:
    """Wait for the end; return exit code, stdout, stderr."""
    async with asyncio.timeout(TIMEOUT):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.asyncio
async def test_poisson_arrivals_against_a_cell(shared_processes: ProcessStack, tmp_path: Path) -> None:
    """Every request gets what it asked for; the file has each one, with exact lengths and no failure."""
    await wait_serving(shared_processes.gateway_address)
    path = tmp_path / "run.json"
    flags = (
        "--rate",
        "20",
        "--requests",
        "12",
        "--input-tokens",
        "8-40",
        "--output-tokens",
        "6",
        "--prefix-tokens",
        "16",
    )
    process = await start(shared_processes, *flags, "--slo", "e2e=100s", "--json", str(path))
    code, out, err = await finish(process)
    assert (code, err) == (0, "")
    assert "open loop, Poisson arrivals, 20 requests/s; 12 requests, 2 before to warm up" in out
    assert "12 ok, 0 failed" in out
    assert "100.0% within e2e 100000.0 ms" in out
    assert "sent late by" in out
    whole = json.loads(path.read_text())
    assert [each["output_tokens"] for each in whole["requests"]] == [6] * 12
    assert all(24 <= each["prompt_tokens"] <= 56 for each in whole["requests"])
    assert len({each["prompt_tokens"] for each in whole["requests"]}) > 3
    arrivals = [each["scheduled"] for each in whole["requests"]]
    assert arrivals == sorted(arrivals)
    assert whole["figures"]["cpu_per_token"] > 0
    await wait_idle(shared_processes)


@pytest.mark.asyncio
async def test_ctrl_c_cancels_what_is_live_and_tells_what_has_ended(
    shared_processes: ProcessStack, tmp_path: Path
) -> None:
    """With one short request done and long ones live, SIGINT: exit code 130, the note, one result, an idle cell."""
    await wait_serving(shared_processes.gateway_address)
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"arrival": 0, "max_tokens": 1},
        *({"arrival": 0.2, "max_tokens": LONG} for _ in range(12)),
        {"arrival": 900},
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    steps = (await get_load(shared_processes)).executors[0].num_steps
    process = await start(shared_processes, "--trace", str(trace), "--warmup", "0", "--input-tokens", "8")
    async with asyncio.timeout(TIMEOUT):
        # All twelve run, and have run for a while: the one before them has been answered.
        while True:
            load = await get_load(shared_processes)
            if load.num_running == 12 and load.executors[0].num_steps > steps + 100:
                break
            await asyncio.sleep(0.01)
    process.send_signal(signal.SIGINT)
    code, out, err = await finish(process)
    assert (code, err) == (130, "")
    assert "note: stopped early, with 1 ended and 12 live: the figures are of the former" in out
    assert "1 ok, 0 failed" in out
    await wait_idle(shared_processes)


@pytest.mark.asyncio
async def test_a_profile_tells_where_the_time_of_a_step_goes(tiny_model: PreparedModel, tmp_path: Path) -> None:
    """Of a cell that times its ops: table, picture and JSON, parts that add up to a step; without, what to do."""
    out, png = tmp_path / "run.json", tmp_path / "profile.png"
    load = ("--concurrency", "4", "--requests", "8", "--input-tokens", "8", "--output-tokens", "12", "--json", str(out))
    async with in_process(tiny_model, flags={"profile_ops": "true"}) as cell:
        pages = ("--scheduler-metrics", cell.metrics_address("scheduler"))
        pages += ("--executor-metrics", cell.metrics_address("executor-0"))
        code, printed, err = await finish(await start(cell, *load, *pages, "--profile", str(png)))
        assert (code, err) == (0, "")
        await wait_idle(cell)
    assert f"wrote {png}" in printed
    assert "whole step" in printed
    assert png.read_bytes().startswith(b"\x89PNG")
    profile = json.loads(out.read_text())["profile"]
    # Eight requests of one prompt step and eleven more, at most four in a step.
    assert 8 * 12 / 4 <= profile["num_steps"] <= 8 * 12
    assert 1 <= profile["num_sequences"] <= 4
    parts = profile["device"]
    assert set(parts) > {"idle", "inputs", "linear", "attention", "norms", "activation", "embedding", "sampling"}
    assert all(parts[name] > 0 for name in ("inputs", "linear", "attention", "norms", "activation", "sampling"))
    assert sum(parts.values()) == pytest.approx(profile["seconds"])
    assert all(profile["around"][name] > 0 for name in ("schedule", "hop", "publish"))


@pytest.mark.asyncio
async def test_a_profile_that_cannot_be_had_is_said_before_the_run(
    shared_processes: ProcessStack, tmp_path: Path
) -> None:
    """Where ops are not timed or no page answers: exit code 1, the reason and the flag, and no request was sent."""
    await wait_serving(shared_processes.gateway_address)
    scheduler, executor = (shared_processes.metrics_address(name) for name in ("scheduler", "executor-0"))
    before = (await get_load(shared_processes)).executors[0].num_steps
    for pages, words in (
        ((scheduler, executor), f"the executor at {executor} does not time its ops: start it with --profile-ops"),
        ((scheduler, "127.0.0.1:1"), "cannot read http://127.0.0.1:1/metrics"),
        ((executor, executor), f"the page at {executor} is not that of a scheduler"),
    ):
        flags = ("--scheduler-metrics", pages[0], "--executor-metrics", pages[1], "--profile", str(tmp_path / "p.png"))
        code, out, err = await finish(await start(shared_processes, *flags))
        assert (code, out) == (1, "")
        assert words in err
    assert (await get_load(shared_processes)).executors[0].num_steps == before
