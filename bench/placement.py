"""What it gives to place requests by their cached prefixes: python bench/placement.py [--json OUT].

Two executors, a scheduler and a gateway run as processes of their own with a small random model. Requests of 16 groups,
each with a long prefix of its own, come in random order from a fixed number of clients, and each executor has KV
memory for the prefixes of about half of the groups. First every group comes twice, which is not counted. The scheduler
is started with `--placement round-robin` and with `cache-aware`, in turns, on the same executors, whose caches begin
empty.

`hit_tokens_ratio`: prompt tokens that came from the caches, by those of round-robin. `ttft_p95_ratio`: likewise the
95th percentile of the time to the first token. Of both the median over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import uvloop
from byte_tokenizer import byte_tokenizer
from make_models import make_llama
from service_process import service_process

from octavo.bench.grpc_client import message_of
from octavo.bench.records import BenchRequest
from octavo.bench.target import GenerationOptions
from octavo.models.prepare import prepare
from octavo.rpc.channel import open_channel
from octavo.v1 import inference_pb2_grpc

SCHEMA = "octavo.bench.placement/1"
POLICIES = ("round-robin", "cache-aware")
GROUPS = 16
BLOCK_SIZE = 16
OWN_TOKENS = 32
OUTPUT_TOKENS = 8
_GROUPS_HELD = 8.25
_START_SECONDS = 60.0
_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 256,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
}


@dataclass(frozen=True)
class Answer:
    """What one request got: seconds to its first token, and tokens of its prompt that came from a cache."""

    ttft: float
    cached_tokens: int


def make_model(folder: Path) -> Path:
    """Write a random model of 256 tokens, one a byte, and prepare it."""
    tokenizer_folder = folder / "tokenizer"
    tokenizer_folder.mkdir()
    byte_tokenizer().save(str(tokenizer_folder / "tokenizer.json"))
    (tokenizer_folder / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    model = folder / "model"
    make_llama(model, _CONFIG, tokenizer_of=tokenizer_folder)
    prepare(str(model))
    return model


def kv_bytes(num_blocks: int) -> int:
    """Return what so many blocks take, keys and values in 16 bits."""
    per_token = 2 * _CONFIG["num_hidden_layers"] * _CONFIG["num_key_value_heads"] * _CONFIG["head_dim"] * 2
    return int(num_blocks * BLOCK_SIZE * per_token)


class Load:
    """Prompts of all groups, always the same for a seed."""

    def __init__(self, seed: int, prefix_tokens: int) -> None:
        self._chance = random.Random(seed)
        self._prefixes = [self._tokens(prefix_tokens) for _ in range(GROUPS)]

    def prompts(self, num_requests: int) -> Iterator[list[int]]:
        """Yield so many, each of a group by chance."""
        for _ in range(num_requests):
            yield self._prefixes[self._chance.randrange(GROUPS)] + self._tokens(OWN_TOKENS)

    def first_prompts(self) -> Iterator[list[int]]:
        """Yield two of each group."""
        for prefix in (*self._prefixes, *self._prefixes):
            yield prefix + self._tokens(OWN_TOKENS)

    def _tokens(self, count: int) -> list[int]:
        return [self._chance.randrange(1, 256) for _ in range(count)]


async def _ask(stub: Any, prompt: list[int]) -> Answer:
    request = message_of(BenchRequest(prompt, OUTPUT_TOKENS), GenerationOptions())
    began, first, cached = time.perf_counter(), 0.0, 0
    async for response in stub.Generate(request, wait_for_ready=True):
        if response.HasField("delta") and not first:
            first = time.perf_counter() - began
        if response.HasField("usage"):
            cached = response.usage.cached_tokens
    return Answer(first, cached)


async def ask_all(stub: Any, prompts: Iterator[list[int]], num_clients: int) -> list[Answer]:
    """Send prompts in order, each by the first client that has its answer to the one before."""
    answers: list[Answer] = []

    async def client() -> None:
        for prompt in prompts:
            answers.append(await _ask(stub, prompt))  # noqa: PERF401 - clients share the list and the prompts

    async with asyncio.TaskGroup() as group:
        for _ in range(num_clients):
            group.create_task(client())
    return answers


@contextlib.asynccontextmanager
async def _gateway(model: Path, executors: list[str], policy: str) -> AsyncIterator[Any]:
    """Start a scheduler and a gateway; yield the gateway's stub once all executors are in session."""
    flags = {"executors": ",".join(executors), "placement": policy, "log-level": "info"}
    async with service_process("scheduler_svc", flags) as scheduler:
        given = {"model": str(model), "scheduler": scheduler.address}
        async with service_process("gateway", given) as gateway, open_channel(gateway.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            async with asyncio.timeout(_START_SECONDS), open_channel(scheduler.address) as admin:
                await _until_joined(admin, len(executors))
            yield stub


async def _until_joined(channel: Any, num_executors: int) -> None:
    from octavo.internal.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

    stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
    while True:
        load = await stub.GetLoad(scheduler_pb2.GetLoadRequest(), wait_for_ready=True)
        if len(load.executors) == num_executors and load.num_gateways:
            return
        await asyncio.sleep(0.05)


async def measure(
    model: Path, executors: list[str], policy: str, seed: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Run the load under one policy; returns its figures."""
    load = Load(seed, args.prefix_tokens)
    async with _gateway(model, executors, policy) as stub:
        await ask_all(stub, load.first_prompts(), args.clients)
        began = time.perf_counter()
        answers = await ask_all(stub, load.prompts(args.requests), args.clients)
        seconds = time.perf_counter() - began
    ttfts = [answer.ttft for answer in answers]
    hits = sum(answer.cached_tokens for answer in answers)
    return {
        "hit_tokens": hits,
        "hit_share": round(hits / (args.prefix_tokens * len(answers)), 3),
        "ttft_p50_ms": round(1e3 * median(ttfts), 1),
        "ttft_p95_ms": round(1e3 * quantiles(ttfts, n=20)[-1], 1),
        "total_s": round(seconds, 2),
    }


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure both policies in every round."""
    rounds: list[dict[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        num_blocks = 1 + round(_GROUPS_HELD * args.prefix_tokens / BLOCK_SIZE)
        flags = {"model": str(model), "threads": "1", "kv-memory": str(kv_bytes(num_blocks)), "dtype": "bfloat16"}
        async with contextlib.AsyncExitStack() as stack:
            executors = [
                (await stack.enter_async_context(service_process("executor_svc", flags))).address for _ in range(2)
            ]
            for number in range(args.rounds):
                made = {policy: await measure(model, executors, policy, number, args) for policy in POLICIES}
                rounds.append(made)
                print(f"round {number + 1}: {made}", file=sys.stderr)

    def ratio(figure: str) -> float:
        return round(median(made["cache-aware"][figure] / made["round-robin"][figure] for made in rounds), 3)

    return {
        "schema": SCHEMA,
        "hit_tokens_ratio": ratio("hit_tokens"),
        "ttft_p95_ratio": ratio("ttft_p95_ms"),
        "ttft_p50_ratio": ratio("ttft_p50_ms"),
        "total_s_ratio": ratio("total_s"),
        "num_groups": GROUPS,
        "num_executors": 2,
        "prefix_tokens": args.prefix_tokens,
        "blocks_an_executor": num_blocks,
        "rounds": rounds,
    }


def print_table(figures: dict[str, Any]) -> None:
    """Print what a reader wants."""
    names = ("hit_tokens", "hit_share", "ttft_p50_ms", "ttft_p95_ms", "total_s")
    print(f"{'placement':14}" + "".join(f"{name:>14}" for name in names))
    for policy in POLICIES:
        columns = (median(made[policy][name] for made in figures["rounds"]) for name in names)
        print(f"{policy:14}" + "".join(f"{value:14g}" for value in columns))
    print(
        f"\ncache-aware by round-robin: {figures['hit_tokens_ratio']:.2f} of the tokens that hit, "
        f"{figures['ttft_p95_ratio']:.2f} of the time to the first token (95th percentile)"
    )


def main() -> int:
    """Measure, print a table, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=160, help="requests counted of each run [default: 160]")
    parser.add_argument("--clients", type=int, default=8, help="requests at once [default: 8]")
    parser.add_argument("--prefix-tokens", type=int, default=1024, help="of each group [default: 1024]")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each policy [default: 1]")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file")
    args = parser.parse_args()
    figures = uvloop.run(run(args))
    print_table(figures)
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
