"""How well KV memory is used: python bench/memory.py [--json OUT].

A cell of the three real services runs a mixed workload with a real model. Its scheduler runs in this process, so that
the ledger is read at every single step. Then the same cell, with the same memory, runs the same workload with no more
sequences at once than would fit if each had memory for the longest sequence set aside. Both are looked at while
requests wait for memory: from the first request that ends on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import save_file
from service_process import service_process
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo.local.probe import wait_until_serving
from octavo.models import ModelError
from octavo.models.catalog import DEFAULT_MODEL
from octavo.models.prepare import prepare
from octavo.models.prepared import PreparedModel, open_prepared
from octavo.rpc.channel import open_channel
from octavo.rpc.settings import read
from octavo.settings import SchedulerSettings
from octavo.v1 import inference_pb2, inference_pb2_grpc
from scheduler_svc.batch import ScheduledBatch
from scheduler_svc.engine import Engine
from scheduler_svc.policies.registry import load_policy
from scheduler_svc.sequence import SequenceStatus
from scheduler_svc.server import SchedulerServer

NUM_SLOTS = 4096
MAX_MODEL_LEN = 1024
BLOCK_SIZE = 16
NUM_CLIENTS = 28
_DEPTH = 2
_START_SECONDS = 120.0

MIX = ((6, (60, 240), (20, 160)), (2, (300, 700), (16, 120)), (2, (30, 100), (150, 300)))
"""Weight, least and most tokens of input, of output: chats, questions about documents, pieces of writing."""


@dataclass(frozen=True)
class Sample:
    """The ledger just after a step was built. Slots that the step's own rows fill count as filled."""

    num_running: int
    num_waiting: int
    num_owned_slots: int
    num_filled_slots: int


class SampledEngine(Engine):
    """The engine, looked at once a step."""

    def __init__(self) -> None:
        super().__init__(load_policy("fcfs"), _DEPTH)
        self.samples: list[Sample] = []

    def schedule(self, session: int, now: float) -> ScheduledBatch | None:
        """See Engine."""
        batch = super().schedule(session, now)
        if batch is not None and batch.num_tokens:
            self.samples.append(self._sample())
        return batch

    def _sample(self) -> Sample:
        load = self.load()
        filled: dict[int, int] = {}
        for sequence in self.live_sequences():
            if sequence.status is SequenceStatus.RUNNING:
                for index, block in enumerate(sequence.block_table):
                    count = min(BLOCK_SIZE, max(0, sequence.num_computed_tokens - index * BLOCK_SIZE))
                    filled[block] = max(filled.get(block, 0), count)
        owned = sum(executor.owned_blocks for executor in load.executors)
        return Sample(load.num_running, load.num_waiting, owned * BLOCK_SIZE, sum(filled.values()))


def make_tiny_model(folder: Path) -> PreparedModel:
    """Write a Llama with two layers of random weights, for where the demo model is not at hand."""
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    hidden, inner, vocab, heads = 64, 128, len(alphabet), 4
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": MAX_MODEL_LEN,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    shapes = {"model.embed_tokens": (vocab, hidden), "model.norm": (hidden,)}
    for index in range(2):
        layer = f"model.layers.{index}"
        shapes |= {f"{layer}.{name}": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{layer}.self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"{layer}.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj"] = (hidden, inner)
    torch.manual_seed(0)
    weights = {f"{name}.weight": torch.randn(shape) / hidden**0.5 for name, shape in shapes.items()}
    save_file(weights, str(folder / "model.safetensors"))
    prepare(str(folder), report=_say_nothing)
    return open_prepared(str(folder))


def _say_nothing(line: str) -> None:
    """Take a line of progress."""


def pick_model(folder: Path) -> tuple[PreparedModel, int]:
    """Return the demo model where it has been pulled, else a tiny one; and the bytes of a token's KV in float32."""
    try:
        demo = open_prepared(DEFAULT_MODEL)
        demo.check_weights()
    except ModelError:
        return make_tiny_model(folder / "tiny"), 2 * 2 * 64 * 4
    return demo, 2 * 30 * 3 * 64 * 4


@contextlib.asynccontextmanager
async def scheduler(engine: Engine, executor_port: int) -> AsyncIterator[int]:
    """Run a scheduler in this process. Yields its port."""
    argv = ["--executors", f"127.0.0.1:{executor_port}", "--port", "0", "--metrics-port", "0"]
    server = SchedulerServer(read(SchedulerSettings, argv, {}, frozenset()), engine=engine, term_patience=0.0)
    await server.start()
    stop = asyncio.Event()
    running = asyncio.create_task(server.run(stop.wait()))
    try:
        yield server.port
    finally:
        stop.set()
        if await running:
            raise SystemExit("the scheduler failed")


def workload(vocab_size: int) -> Iterator[inference_pb2.GenerateRequest]:
    """Yield requests without end, always the same."""
    draw = random.Random(5)
    weights = [weight for weight, _, _ in MIX]
    for index in itertools.count():
        _, inputs, outputs = draw.choices(MIX, weights)[0]
        token_ids = [draw.randrange(3, vocab_size) for _ in range(draw.randint(*inputs))]
        request = inference_pb2.GenerateRequest(seed=index)
        request.token_ids.ids.extend(token_ids)
        request.sampling.temperature = 1.0
        request.stopping.max_tokens = draw.randint(*outputs)
        request.stopping.ignore_eos = True
        yield request


async def _client(stub: Any, requests: Iterator[inference_pb2.GenerateRequest], first_end: asyncio.Event) -> None:
    """Send requests, one after the other, for ever."""
    for request in requests:
        num_tokens = 0
        async for event in stub.Generate(request):
            num_tokens += len(event.delta.token_ids)
        if num_tokens != request.stopping.max_tokens:
            raise SystemExit(f"a request got {num_tokens} tokens of {request.stopping.max_tokens}")
        first_end.set()


@dataclass(frozen=True)
class Figures:
    """Means over the steps looked at."""

    num_steps: int
    num_running: float
    waste: float
    tokens_per_second: float
    num_preemptions: int


async def measure(model: PreparedModel, kv_memory: int, max_num_seqs: int, seconds: float) -> Figures:
    """Run the workload for so many seconds after the first request has ended."""
    engine = SampledEngine()
    executor_flags = {
        "model": str(model.path),
        "dtype": "float32",
        "max-num-seqs": str(max_num_seqs),
        "max-model-len": str(MAX_MODEL_LEN),
        "block-size": str(BLOCK_SIZE),
        "kv-memory": str(kv_memory),
    }
    async with (
        service_process("executor_svc", executor_flags) as executor,
        scheduler(engine, executor.line["port"]) as scheduler_port,
        service_process("gateway", {"model": str(model.path), "scheduler": f"127.0.0.1:{scheduler_port}"}) as gateway,
        open_channel(gateway.address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        async with asyncio.timeout(_START_SECONDS):
            await wait_until_serving(gateway.address)
        requests, first_end = workload(model.vocab_size), asyncio.Event()
        clients = [asyncio.ensure_future(_client(stub, requests, first_end)) for _ in range(NUM_CLIENTS)]
        try:
            waiting = asyncio.ensure_future(first_end.wait())
            await asyncio.wait((waiting, *clients), return_when=asyncio.FIRST_COMPLETED)
            engine.samples.clear()
            started, tokens = asyncio.get_running_loop().time(), engine.load().num_generated_tokens
            await asyncio.wait(clients, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            duration = asyncio.get_running_loop().time() - started
            samples, load = list(engine.samples), engine.load()
        finally:
            for client in clients:
                client.cancel()
            ends = await asyncio.gather(*clients, return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException) and not isinstance(end, asyncio.CancelledError):
            raise end
    assert all(sample.num_waiting for sample in samples), "nobody waited for memory"
    return Figures(
        num_steps=len(samples),
        num_running=fmean(sample.num_running for sample in samples),
        waste=fmean(1 - sample.num_filled_slots / sample.num_owned_slots for sample in samples),
        tokens_per_second=(load.num_generated_tokens - tokens) / duration,
        num_preemptions=load.num_preemptions,
    )


async def run(seconds: float) -> dict[str, Any]:
    """Measure both ways of setting memory aside."""
    with tempfile.TemporaryDirectory() as folder:
        model, slot_bytes = pick_model(Path(folder))
        kv_memory = (NUM_SLOTS + BLOCK_SIZE) * slot_bytes
        paged = await measure(model, kv_memory, NUM_CLIENTS + 1, seconds)
        contiguous = await measure(model, kv_memory, NUM_SLOTS // MAX_MODEL_LEN, seconds / 2)
    return {
        "kv_waste_fraction": round(paged.waste, 4),
        "concurrency_vs_contiguous": round(paged.num_running / contiguous.num_running, 3),
        "model": model.name,
        "num_slots": NUM_SLOTS,
        "max_model_len": MAX_MODEL_LEN,
        "paged": asdict(paged),
        "contiguous": asdict(contiguous),
    }


def main() -> int:
    """Measure, print a table, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="length of the measurement [default: 30]")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    figures = asyncio.run(run(args.seconds))
    model = figures["model"]
    print(f"{model}: KV of {NUM_SLOTS} tokens, {MAX_MODEL_LEN} tokens a sequence at most, {NUM_CLIENTS} clients")
    print(f"{'':12}{'steps':>8}{'running':>10}{'waste':>10}{'tokens/s':>10}{'preempted':>11}")
    for name in ("paged", "contiguous"):
        row = figures[name]
        print(
            f"{name:12}{row['num_steps']:8}{row['num_running']:10.2f}{row['waste']:10.2%}"
            f"{row['tokens_per_second']:10.1f}{row['num_preemptions']:11}"
        )
    print(f"{figures['concurrency_vs_contiguous']:.2f} times as many sequences run at once in the same memory")
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
