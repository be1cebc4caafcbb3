"""The Triton set, interpreted, under the pipelined runner: what a GPU runs but for the GPU."""

from __future__ import annotations

from pathlib import Path

import torch
from factories import make_llama
from fake_device import FakeDevice
from fakes_executor import Driver, make_limits, make_sequence
from fakes_pipeline import Ahead, make_pipelined, poisoned_cache

from executor_svc.batch import NewSequence, SamplingParams
from executor_svc.kernels import KernelSet, build_kernels
from executor_svc.model_runner import ModelRunner
from executor_svc.models import load_weights
from executor_svc.sampler import Sampler

LIMITS = make_limits(
    block_size=16, num_blocks=12, max_num_seqs=2, max_num_batched_tokens=40, max_model_len=40, vocab_size=320
)
CPU = torch.device("cpu")


def _sequences() -> dict[str, NewSequence]:
    drawn = SamplingParams(temperature=1.0, seed=5, top_p=0.9)
    return {
        "greedy": make_sequence(0, [7, 200, 31, 5], max_tokens=4),
        "drawn": make_sequence(0, list(range(3, 20)), max_tokens=5, sampling=drawn),
    }


def test_tokens_are_those_of_the_reference(tmp_path: Path, triton_set: KernelSet) -> None:
    """Prefill launch by launch and decode by graphs, two steps in flight: the tokens of the reference set in float32,
    one step at a time.
    """
    folder = make_llama(tmp_path / "tiny", num_layers=1, seed=3)
    reference = build_kernels("reference")
    model = load_weights(folder, torch.float32, CPU, reference)
    plain = Driver(ModelRunner(model, poisoned_cache(model, LIMITS), Sampler(reference), LIMITS).run, LIMITS)
    device = FakeDevice()
    watched = device.watch.kernels(triton_set)
    on_device = load_weights(folder, torch.float32, CPU, watched)
    with torch.inference_mode(), device.watching():
        runner = make_pipelined(LIMITS, on_device, device, kernels=watched)
        driver = Driver(Ahead(runner).run, LIMITS, depth=2)
        for key, sequence in _sequences().items():
            driver.add(key, sequence)
        outputs = driver.finish()
    for key, sequence in _sequences().items():
        plain.add(key, sequence)
    assert outputs == plain.finish()
