"""Offers requests to a gateway, cheaply: the load generator of bench/overload.py, a process of its own.

    python bench/offers.py --address HOST:PORT --seconds S (--clients N | --rate R) [--max-tokens N]

`--clients`: so many, each of which asks again once it was answered. `--rate`: so many requests a second, each at its
time, whatever became of those before. Answers are counted and not looked into. Prints "begun" at the start and one line
of JSON at the end; what is still under way then is waited for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).parents[1]))

import grpc
import grpc.aio
import uvloop
from run_queue import waited

from octavo.rpc.channel import open_channel
from octavo.v1 import inference_pb2

METHOD = "/octavo.v1.InferenceService/Generate"
_TICK = 0.002
"""Seconds between looks at the clock."""
_COARSE = 0.001
"""Seconds by which a timer of the event loop may be late with nothing else to do."""


class Offers:
    """Requests that are asked, and what became of them. Times in seconds."""

    def __init__(self, channel: grpc.aio.Channel, max_tokens: int) -> None:
        # Bytes in, bytes out: what a client does with a message is not what is measured.
        self._generate = channel.unary_stream(METHOD)
        self._max_tokens = max_tokens
        self._count = 0
        self.begun_at = 0.0
        self.ended_at: list[float] = []
        self.refused_after: list[float] = []
        self.own_shares: list[float] = []
        self.late_total = 0.0
        self.loop_lags: list[float] = []
        self.lags: list[float] = []
        self.failures: list[str] = []

    async def watch_loop(self) -> NoReturn:
        """Measure how late this process's event loop is, for ever: what it adds to every time that it measures."""
        due = time.monotonic() + _TICK
        while True:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            late = max(0.0, time.monotonic() - due - _COARSE)
            self.loop_lags.append(late)
            self.late_total += late
            due = time.monotonic() + _TICK

    async def ask(self) -> None:
        """Ask once, and note what became of it."""
        self._count += 1
        request = inference_pb2.GenerateRequest()
        # No two begin alike, so none is spared anything by the prefix cache.
        request.token_ids.ids.extend((3 + self._count % 200, 3 + self._count // 200 % 200, 5))
        request.stopping.max_tokens = self._max_tokens
        request.stopping.ignore_eos = True
        request.sampling.temperature = 0
        asked_at, late_before = time.monotonic(), self.late_total
        call = self._generate(request.SerializeToString())
        has_begun = False
        try:
            while await call.read() is not grpc.aio.EOF:
                has_begun = True
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and not has_begun:
                self.refused_after.append(after := time.monotonic() - asked_at)
                self.own_shares.append(min(after, self.late_total - late_before))
            else:
                self.failures.append(f"{error.code().name}: {error.details()}")
        else:
            self.ended_at.append(time.monotonic() - self.begun_at)

    async def by_clients(self, num_clients: int, seconds: float) -> None:
        """Have so many clients ask for so long."""

        async def client() -> None:
            while time.monotonic() - self.begun_at < seconds:
                await self.ask()

        await asyncio.gather(*(client() for _ in range(num_clients)))

    async def by_rate(self, rate: float, seconds: float) -> None:
        """Ask so many times a second for so long."""
        asked: set[asyncio.Task[None]] = set()
        number = 0
        while (now := time.monotonic() - self.begun_at) < seconds:
            while number < now * rate:
                self.lags.append(now - number / rate)
                number += 1
                task = asyncio.create_task(self.ask())
                asked.add(task)
                task.add_done_callback(asked.discard)
            await asyncio.sleep(_TICK)
        await asyncio.gather(*asked)


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Offer, and return what was seen."""
    async with open_channel(arguments.address) as channel:
        await channel.channel_ready()
        offers = Offers(channel, arguments.max_tokens)
        print("begun", flush=True)
        offers.begun_at = time.monotonic()
        watch = asyncio.create_task(offers.watch_loop())
        if arguments.clients:
            await offers.by_clients(arguments.clients, arguments.seconds)
        else:
            await offers.by_rate(arguments.rate, arguments.seconds)
        watch.cancel()
    return {
        "ended_at": offers.ended_at,
        "refused_after": offers.refused_after,
        "own_shares": offers.own_shares,
        "loop_lags": offers.loop_lags,
        "lags": offers.lags,
        "failures": offers.failures,
        "cpu_s": time.process_time(),
        "cpu_wait_s": waited(os.getpid()),
    }


def main() -> None:
    """Offer, print."""
    parser = argparse.ArgumentParser(description="Offer requests to a gateway.")
    parser.add_argument("--address", required=True, help="the gateway")
    parser.add_argument("--seconds", type=float, required=True, help="how long requests are asked")
    parser.add_argument("--clients", type=int, default=0, help="clients that ask one after the other")
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second")
    parser.add_argument("--max-tokens", type=int, default=192, help="length of each answer")
    print(json.dumps(uvloop.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
