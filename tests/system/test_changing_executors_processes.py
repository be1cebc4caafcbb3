"""Executor processes that start and stop under load, at random: nothing fails, and load evens out."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_cell import ChaosCell, chaos_cell
from stack_client import read_stream, request_for

from octavo.models.prepared import PreparedModel
from octavo.rpc.channel import open_channel
from octavo.v1 import inference_pb2_grpc

SEED = 11
NUM_CHANGES = 20
NUM_CLIENTS = 24
NUM_PROMPTS = 12
EVEN_WITHIN = 10.0
NUM_TOKENS = 40
FLAGS = {"executor_svc": {"kv-memory": "16MiB", "check-invariants": "false"}}


class Clients:
    """They send requests without a pause; each prompt has one right answer."""

    def __init__(self, cell: ChaosCell) -> None:
        self._cell = cell
        self._answers: dict[int, list[int]] = {}
        self._is_over = False
        self.num_ended = 0

    async def run(self) -> None:
        """Send until `stop`. Raises what a request fails with."""
        async with open_channel(self._cell.address("gateway-0")) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            async with asyncio.TaskGroup() as group:
                for number in range(NUM_CLIENTS):
                    group.create_task(self._client(stub, random.Random(number)))

    def stop(self) -> None:
        """Send no more."""
        self._is_over = True

    async def _client(self, stub: inference_pb2_grpc.InferenceServiceStub, chance: random.Random) -> None:
        while not self._is_over:
            number = chance.randrange(NUM_PROMPTS)
            prompt = [5 + number % 4] * 48 + [20 + number]
            output = await read_stream(stub.Generate(request_for(prompt, NUM_TOKENS, ignore_eos=True)))
            token_ids = list(output.choices[0].token_ids)
            assert len(token_ids) == NUM_TOKENS
            assert token_ids == self._answers.setdefault(number, token_ids), "an answer has changed"
            self.num_ended += 1


def changes(cell: ChaosCell) -> Iterator[tuple[str, signal.Signals | None]]:
    """Yield which executor is to start (None), or to be stopped by which signal; one is left at all times."""
    chance = random.Random(SEED)
    up = set(cell.executors)
    for _ in range(NUM_CHANGES):
        down = sorted(set(cell.executors) - up)
        if down and (len(up) == 1 or chance.random() < 0.5):
            name = chance.choice(down)
            up.add(name)
            yield name, None
        else:
            name = chance.choice(sorted(up))
            up.remove(name)
            yield name, chance.choice([signal.SIGTERM, signal.SIGKILL])


async def until_even(cell: ChaosCell, num_executors: int) -> None:
    """Wait until so many executors have about as much to do; from the moment on that they are there, not too long."""
    loop = asyncio.get_running_loop()
    while len((load := await cell.load()).executors) != num_executors:
        await asyncio.sleep(0.1)
    since = loop.time()
    while True:
        counts = [each.num_running + each.num_waiting for each in load.executors]
        mean = sum(counts) / len(counts)
        if len(counts) == num_executors and all(abs(count - mean) <= max(3.0, mean / 3) for count in counts):
            return
        assert loop.time() - since < EVEN_WITHIN, counts
        await asyncio.sleep(0.1)
        load = await cell.load()


@pytest.mark.full
@pytest.mark.asyncio
@pytest.mark.timeout(900)
async def test_twenty_changes_of_processes(tiny_model: PreparedModel, tmp_path: Path) -> None:
    """Executors at known addresses are stopped, killed and started twenty times: every request ends with the tokens
    that it has always had, and ten seconds after each change all executors have about as much to do.
    """
    async with chaos_cell(tiny_model, tmp_path, SEED, FLAGS, num_executors=4) as cell:
        clients = Clients(cell)
        running = asyncio.create_task(clients.run())
        num_up = len(cell.executors)
        for name, signum in changes(cell):
            if signum is None:
                cell.start_service(name)
                num_up += 1
            else:
                cell.signal(name, signum)
                await cell.wait_exit(name)
                num_up -= 1
            await until_even(cell, num_up)
            assert not running.done(), running.exception()
        clients.stop()
        await running
        assert clients.num_ended > NUM_CHANGES
        load = await cell.wait_idle(30.0)
        assert (load.num_requests, load.num_desyncs) == (0, 0)
