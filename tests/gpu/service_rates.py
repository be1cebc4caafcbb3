"""Tokens per second through gateway, scheduler and executor, a process each, over a model with random weights."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import torch
from factories import EOS_TOKEN_ID, make_tokenizer
from random_decoder import Shape
from random_llama import config_of, scale_of, tensors_of
from safetensors.torch import save_file
from torch import Tensor

import octavo
from octavo.local.plan import PlanOptions, plan_cell
from octavo.local.probe import wait_until_serving
from octavo.models import open_prepared
from octavo.models.prepare import prepare

PROMPT_TOKENS = 64
NEW_TOKENS = 128
START_SECONDS = 150.0
STOP_SECONDS = 20.0


@dataclass(frozen=True)
class ServiceRate:
    """What so many clients got, each with one request at a time."""

    model: str
    graph: bool
    clients: int
    tokens: int
    seconds: float
    first_token_seconds: float
    """Median over the requests."""

    @property
    def tokens_per_second(self) -> float:
        """Of all clients together."""
        return self.tokens / self.seconds


def write_model(folder: Path, shape: Shape, device: torch.device, dtype: torch.dtype) -> Path:
    """Write a Llama of a shape with random weights, which are drawn on `device`, and a small tokenizer; prepare it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_of(shape, dtype)))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": EOS_TOKEN_ID}))
    make_tokenizer(folder)
    save_file(dict(_weights(shape, device, dtype)), folder / "model.safetensors", metadata={"format": "pt"})
    prepare(str(folder), report=lambda line: None)
    return folder


def _weights(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator(device).manual_seed(0)

    for name, each in tensors_of(shape).items():
        scale = scale_of(name, each)
        if scale is None:
            yield name, torch.ones(each, dtype=dtype)
        else:
            yield name, (torch.randn(each, generator=generator, device=device) * scale).to(dtype).cpu()


@contextlib.contextmanager
def cell(folder: Path, logs: Path, flags: Mapping[str, str]) -> Iterator[str]:
    """Start the three services, give the gateway's address, and end them."""
    ports = ("gateway_port", "scheduler_port", "executor_port", "admin_port", "http_port", "metrics_port")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
    options = PlanOptions(**dict.fromkeys(ports, 0), extra=flags)  # type: ignore[arg-type]
    plan = plan_cell(open_prepared(str(folder)), options, environ)
    logs.mkdir(parents=True, exist_ok=True)
    started: list[subprocess.Popen[bytes]] = []
    try:
        for service in plan.services:
            with (logs / f"{service.name}.log").open("wb") as log:
                started.append(subprocess.Popen(service.command, stdout=log, stderr=log, env=environ))
        yield plan.gateway_address
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        for process in started:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def ends_of(logs: Path) -> str:
    """The last lines of every log."""
    return "\n".join(path.read_text(errors="replace")[-1500:] for path in sorted(logs.iterdir()))


async def wait_until_all_serve(address: str, logs: Path) -> None:
    """Wait until the cell serves. Raises RuntimeError with the end of the logs where it does not come to that."""
    try:
        async with asyncio.timeout(START_SECONDS):
            await wait_until_serving(address)
    except TimeoutError:
        raise RuntimeError(f"not serving after {START_SECONDS:.0f} s:\n{ends_of(logs)}") from None


async def measure(address: str, clients: int, vocab: int, new_tokens: int) -> tuple[int, float, float]:
    """Have so many clients ask for text at once; return the tokens, the seconds, and the median to the first token."""
    firsts: list[float] = []

    async def ask(client: octavo.AsyncClient, number: int) -> int:
        prompt = [3 + (number * 7919 + place * 31) % (vocab - 3) for place in range(PROMPT_TOKENS)]
        count, begun = 0, perf_counter()
        async for delta in client.generate(prompt, temperature=0, max_tokens=new_tokens, ignore_eos=True):
            if not count:
                firsts.append(perf_counter() - begun)
            count += len(delta.token_ids)
        return count

    async with octavo.AsyncClient(address) as client:
        await ask(client, clients)
        firsts.clear()
        begun = perf_counter()
        counts = await asyncio.gather(*(ask(client, number) for number in range(clients)))
        return sum(counts), perf_counter() - begun, sorted(firsts)[len(firsts) // 2]


async def service_rates(
    folder: Path,
    logs: Path,
    shape: Shape,
    *,
    device: str,
    dtype: str,
    graph: bool,
    clients: tuple[int, ...],
    new_tokens: int = NEW_TOKENS,
    flags: Mapping[str, str] | None = None,
) -> list[ServiceRate]:
    """Serve a model, and measure it with each number of clients."""
    most = max(clients)
    given = {"device": device, "dtype": dtype, "max_num_seqs": str(most), "max_num_batched_tokens": "2048"}
    given |= {"max_model_len": str(PROMPT_TOKENS + new_tokens + 16), "log_level": "info"}
    if not graph:
        given["enforce_eager"] = "true"
    rates = []
    with cell(folder, logs, given | dict(flags or {})) as address:
        await wait_until_all_serve(address, logs)
        # Only ids of the tokenizer are taken.
        vocab = open_prepared(str(folder)).vocab_size
        for count in clients:
            tokens, seconds, first = await measure(address, count, vocab, new_tokens)
            rates.append(ServiceRate(shape.name, graph, count, tokens, seconds, first))
    return rates


def as_rows(rates: list[ServiceRate]) -> list[dict[str, object]]:
    """For JSON."""
    return [asdict(each) | {"tokens_per_second": each.tokens_per_second} for each in rates]
