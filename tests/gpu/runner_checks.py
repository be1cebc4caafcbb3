"""The executor's own runner on the device, with graphs and without, against the CPU's in float32: to the token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from factories import make_llama
from fakes_executor import Driver, make_limits, make_sequence
from fakes_pipeline import Ahead, make_plain, poisoned_cache

from executor_svc.batch import NewSequence, SamplingParams
from executor_svc.device import Device
from executor_svc.kernels import KernelSet, build_kernels
from executor_svc.kv_cache import KVCache
from executor_svc.models import load_weights
from executor_svc.pipeline.graphs import graph_sizes
from executor_svc.pipeline.runner import PipelinedRunner

LIMITS = make_limits(
    block_size=16, num_blocks=80, max_num_seqs=6, max_num_batched_tokens=64, max_model_len=160, vocab_size=320
)
DRAWN = SamplingParams(temperature=1.0, seed=5, top_p=0.95)


def sequences() -> dict[str, NewSequence]:
    """Prompts around the block size, every kind of sampling."""
    generator = torch.Generator().manual_seed(0)

    def prompt(length: int) -> list[int]:
        tokens: list[int] = torch.randint(3, 320, (length,), generator=generator).tolist()
        return tokens

    return {
        "15": make_sequence(0, prompt(15), max_tokens=40),
        "16": make_sequence(0, prompt(16), max_tokens=40),
        "17": make_sequence(0, prompt(17), max_tokens=30, sampling=SamplingParams(0.0, repetition_penalty=2.0)),
        "33": make_sequence(0, prompt(33), max_tokens=30, sampling=replace(DRAWN, frequency_penalty=1.0), choice=2),
        "1": make_sequence(0, prompt(1), max_tokens=50, sampling=replace(DRAWN, min_p=0.02, top_k=40)),
        "70": make_sequence(0, prompt(70), max_tokens=40, sampling=replace(DRAWN, top_logprobs=3)),
    }


def runner_problems(kernels: KernelSet, device: Device, folder: Path) -> Iterator[str]:
    """Yield what differs, for greedy and drawn tokens of a tiny Llama, two steps in flight, prompts in chunks."""
    torch_device = device.torch_device
    make_llama(folder, seed=3)
    model = load_weights(folder, torch.float32, torch.device("cpu"), build_kernels("reference"))
    plain = Driver(make_plain(LIMITS, model).run, LIMITS)
    for key, sequence in sequences().items():
        plain.add(key, sequence)
    expected = plain.finish()
    on_device = load_weights(folder, torch.float32, torch_device, kernels)
    device.synchronize()
    for graphs in (False, True):
        cache = poisoned_cache(on_device, LIMITS)
        with device.on(device.compute):
            moved = [tuple(each.to(torch_device) for each in part) for part in (cache.keys, cache.values)]
        runner = PipelinedRunner(
            on_device, KVCache(LIMITS.num_blocks, LIMITS.block_size, *moved), kernels, LIMITS, device
        )
        if graphs:
            runner.capture_graphs(graph_sizes(LIMITS.max_num_seqs))
        driver = Driver(Ahead(runner).run, LIMITS, depth=2, chunk=20)
        for key, sequence in sequences().items():
            driver.add(key, sequence)
        outputs = driver.finish()
        for key in expected:
            if outputs[key] != expected[key]:
                how = "with graphs" if graphs else "launch by launch"
                yield f"runner {how}, {key} prompt tokens: {outputs[key]} where the CPU has {expected[key]}"
