"""What a streamed token costs the gateway: python bench/gateway.py [--json OUT].

A gateway runs as a process of its own between a scheduler that is made up here and clients that only count. The
scheduler sends the next token of every stream once every client has got the one before, so that no two tokens share a
message, which would make them cheaper. What is measured is the gateway's CPU time, all its threads, divided by tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
from service_process import ServiceProcess, service_process
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo.internal.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from octavo.models.manifest import GenerationConfig, Manifest, WeightFile, revision_of, write_files
from octavo.models.prepared import PreparedModel, open_prepared
from octavo.rpc.channel import open_channel
from octavo.rpc.server import RpcServer
from octavo.v1 import inference_pb2, inference_pb2_grpc

MODEL = "made-up"
PROMPT = "What does the keeper of the lighthouse say?"
TEXT_TOKEN = 70
"""An ordinary letter."""
_START_SECONDS = 60.0


def make_model(folder: Path) -> PreparedModel:
    """Write a model of 256 tokens, one a byte, without weights, which a gateway never opens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    written = tokenizer.to_str().encode()
    weights = (WeightFile("model.safetensors", 1, hashlib.sha256(b"").hexdigest()),)
    generation = GenerationConfig(eos_token_ids=(0,), bos_token_id=None)
    manifest = Manifest(
        name=MODEL,
        revision=revision_of(weights, written, None, generation),
        tokenizer_hash=hashlib.sha256(written).hexdigest(),
        weights="..",
        weight_files=weights,
        vocab_size=256,
        max_position_embeddings=1 << 20,
    )
    prepared = folder / "octavo"
    prepared.mkdir(parents=True)
    write_files(prepared, manifest, written, None, generation)
    return open_prepared(str(prepared))


class Steps:
    """Counts what clients got, so that the scheduler knows when the next token may go."""

    def __init__(self) -> None:
        self.num_streams = 0
        self.num_messages = 0
        self._num_tokens = 0
        self._expected = 0
        self._all_have_it = asyncio.Event()

    def begin(self, num_streams: int) -> None:
        """Start to count anew."""
        self.num_streams, self.num_messages, self._num_tokens = num_streams, 0, 0
        self._expected = num_streams
        self._all_have_it.clear()

    def take(self, num_tokens: int) -> None:
        """Note that some client got a message with so many tokens."""
        self.num_messages += bool(num_tokens)
        self._num_tokens += num_tokens
        if self._num_tokens == self._expected:
            self._all_have_it.set()

    async def wait(self, num_tokens: int) -> None:
        """Return once every client has got so many tokens."""
        self._expected = self.num_streams * num_tokens
        if self._num_tokens < self._expected:
            self._all_have_it.clear()
            await self._all_have_it.wait()


class MadeUpScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Accepts everything; `run` sends tokens in step."""

    def __init__(self, model: PreparedModel) -> None:
        self._model = model
        self._outgoing: asyncio.Queue[scheduler_pb2.AttachResponse] = asyncio.Queue()
        self._submitted: asyncio.Queue[int] = asyncio.Queue()
        self._sequence = 0

    async def Attach(self, request_iterator: Any, context: Any) -> None:  # noqa: N802
        """Serve the gateway."""
        reading = asyncio.create_task(self._read(request_iterator))
        try:
            while True:
                await context.write(await self._outgoing.get())
        finally:
            reading.cancel()

    async def run(self, num_streams: int, num_tokens: int, steps: Steps, stream_interval: int = 1) -> None:
        """Send so many tokens to so many requests once they are all there; of each message all tokens in a row."""
        requests = [await self._submitted.get() for _ in range(num_streams)]
        steps.begin(num_streams)
        for index in range(num_tokens):
            step = scheduler_pb2.StepOutputs(sequence=self._next())
            if index < num_tokens - 1:
                step.requests.extend(requests)
                step.choices.extend([0] * num_streams)
                step.token_indexes.extend([index] * num_streams)
                step.token_ids.extend([TEXT_TOKEN] * num_streams)
            else:
                for request in requests:
                    output = step.outputs.add(request=request, first_token_index=index, token_ids=[TEXT_TOKEN])
                    output.end.reason = scheduler_pb2.FINISH_REASON_LENGTH
            self._send(step_outputs=step)
            if index % stream_interval == 0 or index == num_tokens - 1:
                await steps.wait(index + 1)
        for request in requests:
            self._send(finished=scheduler_pb2.Finished(sequence=self._next(), request=request))

    async def _read(self, request_iterator: Any) -> None:
        async for frame in request_iterator:
            match frame.WhichOneof("frame"):
                case "hello":
                    self._send(welcome=scheduler_pb2.Welcome(term=1))
                    pool = scheduler_pb2.ModelPool(
                        model=MODEL, model_revision=self._model.revision, num_executors=1, max_model_len=1 << 20
                    )
                    self._send(model_pools=scheduler_pb2.ModelPools(pools=[pool]))
                case "submit":
                    self._send(accepted=scheduler_pb2.Accepted(request=frame.submit.request))
                    self._submitted.put_nowait(frame.submit.request)

    def _send(self, **frame: Any) -> None:
        self._outgoing.put_nowait(scheduler_pb2.AttachResponse(**frame))

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence


async def stream_grpc(stub: Any, num_tokens: int, steps: Steps) -> None:
    """Read one stream over gRPC to its end."""
    request = inference_pb2.GenerateRequest(
        text=PROMPT, stopping=inference_pb2.StoppingConfig(max_tokens=num_tokens, ignore_eos=True)
    )
    async for event in stub.Generate(request):
        if event.HasField("delta"):
            steps.take(len(event.delta.token_ids))


async def stream_http(port: int, num_tokens: int, steps: Steps) -> None:
    """Read one stream of server-sent events to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": PROMPT, "max_tokens": num_tokens, "ignore_eos": True, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(body)}\r\n"
    writer.write(f"{head}content-type: application/json\r\n\r\n{body}".encode())
    while (line := await reader.readline()) != b"data: [DONE]\n":
        if not line:
            raise SystemExit("a stream broke off")
        if line.startswith(b"data: "):
            # Of a token one letter; the first and the last piece of a choice have none.
            steps.take(sum(len(choice["text"]) for choice in json.loads(line[6:])["choices"]))
    writer.close()
    await writer.wait_closed()


async def measure(
    gateway: ServiceProcess,
    scheduler: MadeUpScheduler,
    open_stream: Callable[[Steps], Awaitable[None]],
    num_streams: int,
    num_tokens: int,
    stream_interval: int,
) -> tuple[float, float]:
    """Return CPU seconds a token, and tokens a message."""
    steps = Steps()
    before = gateway.cpu_seconds()
    async with asyncio.TaskGroup() as group:
        for _ in range(num_streams):
            group.create_task(_await(open_stream(steps)))
        group.create_task(scheduler.run(num_streams, num_tokens, steps, stream_interval))
    used = gateway.cpu_seconds() - before
    return used / (num_streams * num_tokens), num_streams * num_tokens / steps.num_messages


async def _await(work: Awaitable[None]) -> None:
    await work


async def run(num_streams: int, num_tokens: int, repeats: int, stream_interval: int = 1) -> dict[str, Any]:
    """Measure both fronts in turn, after a warm-up; of the repeats the least counts, since the rest is disturbance."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        server = RpcServer("127.0.0.1", 0)
        scheduler = MadeUpScheduler(model)
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, server.server)
        await server.start("octavo.internal.scheduler.v1.SchedulerService")
        flags = {"model": str(model.path), "scheduler": f"127.0.0.1:{server.port}"}
        flags["stream-interval"] = str(stream_interval)
        try:
            async with (
                service_process("gateway", flags) as gateway,
                open_channel(gateway.address) as channel,
            ):
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                await _wait_serving(stub, scheduler)
                fronts: dict[str, Callable[[Steps], Awaitable[None]]] = {
                    "grpc": lambda steps: stream_grpc(stub, num_tokens, steps),
                    "http": lambda steps: stream_http(gateway.line["http_port"], num_tokens, steps),
                }
                costs: dict[str, list[tuple[float, float]]] = {name: [] for name in fronts}
                for _ in range(1 + repeats):
                    for name, open_stream in fronts.items():
                        cost = await measure(gateway, scheduler, open_stream, num_streams, num_tokens, stream_interval)
                        costs[name].append(cost)
        finally:
            await server.stop(0)
    best = {name: min(each[1:]) for name, each in costs.items()}
    return {
        "num_streams": num_streams,
        "num_tokens": num_tokens,
        "repeats": repeats,
        "stream_interval": stream_interval,
        "us_per_token": {name: round(1e6 * cost, 2) for name, (cost, _) in best.items()},
        "tokens_per_message": {name: round(share, 3) for name, (_, share) in best.items()},
    }


async def _wait_serving(stub: Any, scheduler: MadeUpScheduler) -> None:
    """Return once the gateway knows the scheduler: a request of one token runs."""
    steps = Steps()
    async with asyncio.timeout(_START_SECONDS):
        while True:
            running = asyncio.create_task(scheduler.run(1, 1, steps))
            try:
                steps.begin(1)
                await stream_grpc(stub, 1, steps)
            except grpc.aio.AioRpcError as error:
                running.cancel()
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.05)
            else:
                await running
                return


def main() -> int:
    """Measure, print a table, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32, help="streams at once [default: 32]")
    parser.add_argument("--tokens", type=int, default=300, help="tokens of each [default: 300]")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each front [default: 3]")
    parser.add_argument("--stream-interval", type=int, default=1, help="the gateway's flag of that name [default: 1]")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file")
    args = parser.parse_args()
    figures = asyncio.run(run(args.streams, args.tokens, args.repeats, args.stream_interval))
    print(f"{'front':8}{'us of CPU a token':>20}{'tokens a message':>20}")
    for name, cost in figures["us_per_token"].items():
        print(f"{name:8}{cost:20.2f}{figures['tokens_per_message'][name]:20.3f}")
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
