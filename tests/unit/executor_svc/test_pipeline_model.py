"""The decoder itself under the pipelined runner, and what is asked of a device before it serves."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from factories import make_llama
from fake_device import FakeDevice
from fakes_executor import Driver, make_limits, make_sequence
from fakes_pipeline import Ahead, make_pipelined, make_plain

from executor_svc.batch import Limits, NewSequence, SamplingParams, StepFailureReason
from executor_svc.device import DeviceMemory
from executor_svc.kernels import KernelSet, build_kernels
from executor_svc.kernels.paged_attention.work import plan_work
from executor_svc.kv_cache import block_bytes
from executor_svc.model_runner import failure_of
from executor_svc.models import CausalLM, load_weights
from executor_svc.pipeline import load as load_module
from executor_svc.pipeline.graphs import graph_sizes
from executor_svc.pipeline.load import DevicePlan, load_runner, out_of_memory
from executor_svc.pipeline.profile import Profile, decode_step, largest_step, long_rows, measure
from executor_svc.pipeline.runner import PipelinedRunner
from octavo.rpc.settings import SettingsError

LIMITS = make_limits(
    block_size=16, num_blocks=40, max_num_seqs=6, max_num_batched_tokens=64, max_model_len=120, vocab_size=320
)
RANDOM = SamplingParams(temperature=1.0, seed=5, top_p=0.95)
CPU = torch.device("cpu")


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights on disk."""
    return make_llama(tmp_path_factory.mktemp("models") / "tiny", seed=3)


@pytest.fixture(name="device")
def _device() -> Iterator[FakeDevice]:
    """A device that watches this thread."""
    device = FakeDevice()
    with torch.inference_mode(), device.watching():
        yield device


def _load(folder: Path, device: FakeDevice) -> tuple[CausalLM, KernelSet]:
    kernels = device.watch.kernels(build_kernels("reference"))
    with device.watch.unwatched():
        return load_weights(folder, torch.float32, CPU, kernels), kernels


def _sequences() -> dict[str, NewSequence]:
    generator = torch.Generator().manual_seed(0)

    def prompt(length: int) -> list[int]:
        return torch.randint(3, 320, (length,), generator=generator).tolist()

    return {
        "15": make_sequence(0, prompt(15), max_tokens=12),
        "17": make_sequence(0, prompt(17), max_tokens=16, sampling=SamplingParams(0.0, repetition_penalty=2.0)),
        "33": make_sequence(0, prompt(33), max_tokens=18, sampling=replace(RANDOM, frequency_penalty=1.0), choice=2),
        "1": make_sequence(0, prompt(1), max_tokens=20, sampling=replace(RANDOM, min_p=0.02, top_k=40)),
    }


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_a_models_tokens_are_those_of_the_cpu(folder: Path, device: FakeDevice, graphs: bool) -> None:
    """Tiny Llama in float32, chunked, two steps in flight: every tensor of it is where it belongs."""
    with device.watch.unwatched():
        plain = Driver(
            make_plain(LIMITS, load_weights(folder, torch.float32, CPU, build_kernels("reference"))).run, LIMITS
        )
        for key, sequence in _sequences().items():
            plain.add(key, sequence)
        expected = plain.finish()
        sequences = _sequences()
    model, kernels = _load(folder, device)
    runner = make_pipelined(LIMITS, model, device, graphs=graphs, kernels=kernels)
    driver = Driver(Ahead(runner).run, LIMITS, depth=2, chunk=20)
    for key, sequence in sequences.items():
        driver.add(key, sequence)
    assert driver.finish() == expected
    assert runner.num_graphs == (4 if graphs else 0)


def test_the_largest_step_is_as_large_as_may_be() -> None:
    """All tokens, all rows, each of which samples; its first row is at the end of the longest sequence."""
    step = largest_step(LIMITS)
    assert sum(step.num_scheduled_tokens) <= LIMITS.max_num_batched_tokens
    assert sum(step.num_scheduled_tokens) > LIMITS.max_num_batched_tokens - LIMITS.block_size
    assert len(step.handles) == LIMITS.max_num_seqs
    assert step.num_computed_tokens[0] + step.num_scheduled_tokens[0] == LIMITS.max_model_len - 1
    assert len(largest_step(replace(LIMITS, max_num_batched_tokens=4)).handles) == 4
    assert len(decode_step(LIMITS).handles) == LIMITS.max_num_seqs


def test_graph_sizes() -> None:
    """Powers of two, and all rows."""
    assert graph_sizes(1) == [1]
    assert graph_sizes(8) == [1, 2, 4, 8]
    assert graph_sizes(100) == [1, 2, 4, 8, 16, 32, 64, 100]


def test_a_larger_step_leaves_less_for_kv(folder: Path, device: FakeDevice) -> None:
    """What is measured grows with the step, and what is left is the share less all that is taken."""
    model, kernels = _load(folder, device)
    small = measure(model, model.config, kernels, LIMITS, torch.float32, device, has_graphs=True)
    larger = replace(LIMITS, max_num_batched_tokens=119, max_num_seqs=12)
    large = measure(model, model.config, kernels, larger, torch.float32, device, has_graphs=True)
    assert 0 < small.step < large.step
    assert 0 < small.graphs < large.graphs
    assert small.others == device.others
    taken = small.others + small.held + small.step + small.graphs
    assert small.kv_memory(0.5) == device.total // 2 - taken
    assert small.kv_memory(0.0) == 0


def test_what_the_allocator_cannot_use_is_counted(
    folder: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it took more for a step than the step's tensors fill at any time, KV blocks do not get the rest."""
    model, kernels = _load(folder, device)
    exact = measure(model, model.config, kernels, LIMITS, torch.float32, device, has_graphs=False)
    memory, reset_peak, wasted = FakeDevice.memory, FakeDevice.reset_peak, 3 * exact.step
    torn = [0]

    def asked(self: FakeDevice) -> DeviceMemory:
        told = memory(self)
        return replace(told, held=told.held + torn[0])

    monkeypatch.setattr(FakeDevice, "memory", asked)
    monkeypatch.setattr(FakeDevice, "give_back", lambda self: torn.insert(0, 0))
    monkeypatch.setattr(FakeDevice, "reset_peak", lambda self: (reset_peak(self), torn.insert(0, wasted)))
    torn_step = measure(model, model.config, kernels, LIMITS, torch.float32, device, has_graphs=False).step
    assert torn_step == wasted


def test_nothing_is_left_of_the_runner_that_was_measured(folder: Path, device: FakeDevice) -> None:
    """Its tables go when it goes, and not when Python next looks for cycles: the real runner takes their place."""
    model, kernels = _load(folder, device)
    runner = make_pipelined(LIMITS, model, device, kernels=kernels)
    runner.run(largest_step(replace(LIMITS, num_blocks=2)))
    gone = weakref.ref(runner)
    gc.disable()
    try:
        del runner
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("group", "num_kv_heads"), [(4, 8), (1, 32), (7, 4), (71, 1)])
def test_kernels_that_merge_are_compiled_before_requests_come(group: int, num_kv_heads: int) -> None:
    """Between them the steps that are measured cut rows of few lines and of many into parts, on a card of this size."""
    limits = replace(LIMITS, max_model_len=4096, max_num_batched_tokens=2048)
    merged = set()
    for step in long_rows(limits):
        queries, computed = step.num_scheduled_tokens, step.num_computed_tokens
        contexts = tuple(one + two for one, two in zip(queries, computed, strict=True))
        rows = SimpleNamespace(query_lens=queries, context_lens_host=contexts)
        kind = {"group": group, "num_kv_heads": num_kv_heads, "window": 0, "large_tile": 64, "processors": 132}
        merged |= {work.tile for work in plan_work(rows, **kind) if len(work.merges)}  # type: ignore[arg-type]
    assert merged == {16 if group <= 16 else 64, 64}
    assert long_rows(replace(LIMITS, max_model_len=16)) == []


def _limits_of(bytes_of_block: int, settled: int | None = None) -> Any:
    def limits_of(kv_memory: int) -> Limits:
        blocks = min((settled if settled is not None else kv_memory) // bytes_of_block, LIMITS.num_blocks)
        if blocks < 2:
            raise SettingsError(f"available {kv_memory} bytes for KV: at least 2 blocks are needed")
        return replace(LIMITS, num_blocks=blocks)

    return limits_of


def _load_runner(folder: Path, device: FakeDevice, plan: DevicePlan, limits_of: Any = None) -> PipelinedRunner:
    model, kernels = _load(folder, device)
    limits_of = limits_of or _limits_of(block_bytes(model.config, LIMITS.block_size, torch.float32))
    return load_runner(model, kernels, torch.float32, LIMITS.block_size, plan, limits_of, device)


@pytest.mark.parametrize("is_eager", [True, False])
def test_a_runner_is_loaded_with_what_the_device_holds(
    folder: Path, device: FakeDevice, is_eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV blocks as many as fit, graphs unless they are not wanted, and no stay is left of the warm-up."""
    monkeypatch.setattr(load_module, "can_be_captured", lambda model, kernels: True)
    runner = _load_runner(folder, device, DevicePlan(0.9, None, is_eager))
    assert runner.limits.num_blocks == LIMITS.num_blocks
    assert runner.num_graphs == (0 if is_eager else 4)
    assert runner.num_sequences == 0


def test_graphs_are_captured_of_kernels_that_can_be(
    folder: Path, device: FakeDevice, caplog: pytest.LogCaptureFixture
) -> None:
    """The reference reads numbers on the host on a real device: its steps are launched op by op, and that is said."""
    with caplog.at_level("INFO"):
        assert _load_runner(folder, device, DevicePlan(0.9, None, False)).num_graphs == 0
    assert "decode steps are launched op by op" in caplog.text
    assert "device memory measured" in caplog.text


def test_a_share_that_is_too_small_is_told_with_the_numbers(folder: Path) -> None:
    """How much of the card, and what takes it."""
    device = FakeDevice(total=1 << 30, others=1 << 29)
    with torch.inference_mode(), device.watching(), pytest.raises(SettingsError) as caught:
        _load_runner(folder, device, DevicePlan(0.5, None, True))
    told = str(caught.value)
    assert told.startswith("--gpu-memory-utilization 0.5: 0.50 GiB of the 1.00 GiB of a fake card may be used: other ")
    assert "other processes and the driver 0.50 GiB" in told
    assert "available 0 bytes for KV" in told


def test_kv_memory_that_does_not_fit_is_told_with_the_numbers(folder: Path) -> None:
    """--kv-memory is held against what is left."""
    device = FakeDevice(total=1 << 30, others=1 << 29)
    plan = DevicePlan(0.5, 1 << 20, True)
    with torch.inference_mode(), device.watching(), pytest.raises(SettingsError) as caught:
        _load_runner(folder, device, plan, _limits_of(1 << 16, settled=1 << 20))
    assert str(caught.value).startswith("--kv-memory 1048576: with --gpu-memory-utilization 0.5, 0.50 GiB of the 1.00")
    assert "which leaves 0.00 MiB for KV; lower it, or raise --gpu-memory-utilization" in str(caught.value)


def test_a_largest_step_that_does_not_fit_is_told_with_the_numbers(folder: Path, device: FakeDevice) -> None:
    """The flags that make it so large, and what else takes memory."""
    model, kernels = _load(folder, device)

    def full(*arguments: Any, **named: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    broken = replace(kernels, sample_tokens=full)
    with pytest.raises(SettingsError) as caught:
        measure(model, model.config, broken, LIMITS, torch.float32, device, has_graphs=False)
    told = str(caught.value)
    assert told.startswith(
        "--max-num-batched-tokens 64, --max-num-seqs 6: the largest step does not fit into the memory"
    )
    assert "of 16.00 GiB" in told
    assert "lower one of them, or --max-model-len" in told


def test_whatever_does_not_fit_is_told_with_the_numbers(device: FakeDevice) -> None:
    """Weights, KV blocks, graphs: what the card has, and who has it. Not torch's allocator alone may say so."""
    device.watch.in_use = 1 << 30
    for error in (RuntimeError("Triton Error [CUDA]: out of memory"), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when")):
        with (
            pytest.raises(SettingsError, match="the graphs do not fit into the memory of a fake card"),
            out_of_memory(device, "the graphs", "--enforce-eager"),
        ):
            raise error
        assert failure_of(error).reason is StepFailureReason.OUT_OF_MEMORY
    with pytest.raises(RuntimeError, match="another fault"), out_of_memory(device, "the graphs", "--enforce-eager"):
        raise RuntimeError("another fault")
    with pytest.raises(SettingsError) as caught, out_of_memory(device, "the weights", "--dtype"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore")
    assert str(caught.value) == (
        "the weights do not fit into the memory of a fake card: of 16.00 GiB, 1.00 GiB hold tensors of this executor, "
        "1.00 MiB others, and 15.00 GiB are free; lower --dtype (CUDA out of memory. Tried to allocate 9 GiB.)"
    )


def test_sizes_are_written_for_people() -> None:
    """An account names every part."""
    profile = Profile("a card", 80 << 30, 1 << 30, 20 << 30, 1 << 29, 1 << 20)
    assert profile.account(0.5) == (
        "40.00 GiB of the 80.00 GiB of a card may be used: other processes and the driver 1.00 GiB, weights and tables "
        "20.00 GiB, the largest step 0.50 GiB, graphs 1.00 MiB"
    )
