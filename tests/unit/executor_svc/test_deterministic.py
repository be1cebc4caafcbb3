"""Bit-equal results: whatever else is in a batch, however prompts are chunked, cached, preempted or replayed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from factories import make_llama
from fakes_executor import Driver, make_limits, make_sequence

from executor_svc.batch import NewSequence, SamplingParams, StepBatch, StepResult
from executor_svc.kernels import build_kernels
from executor_svc.kv_cache import KVCache
from executor_svc.model_runner import ModelRunner
from executor_svc.models import CausalLM, load_weights
from executor_svc.sampler import Sampler

LIMITS = make_limits(
    block_size=16, num_blocks=120, max_num_seqs=8, max_num_batched_tokens=400, max_model_len=200, vocab_size=320
)
CPU = torch.device("cpu")
ALL_TOLD = {"top_logprobs": 20, "prompt_logprobs": 20}

Bits = dict[str, list[bytes]]


@pytest.fixture(name="model", scope="module", params=["float32", "bfloat16"])
def _model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    """A tiny model in each dtype."""
    folder = make_llama(tmp_path_factory.mktemp("models") / "tiny", seed=3)
    return load_weights(folder, getattr(torch, request.param), CPU, build_kernels("cpu"))


def _sequences() -> dict[str, NewSequence]:
    """Sequences that tell the logprobs of every token; two begin with the same 32."""
    generator = torch.Generator().manual_seed(0)

    def prompt(length: int) -> list[int]:
        return torch.randint(3, 320, (length,), generator=generator).tolist()

    shared = prompt(32)
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 5, "top_p": 0.95}
    return {
        "1": make_sequence(0, prompt(1), max_tokens=30, sampling=SamplingParams(**drawn, **ALL_TOLD)),
        "17": make_sequence(0, prompt(17), max_tokens=16, sampling=SamplingParams(0.0, **ALL_TOLD)),
        "shared 1": make_sequence(0, shared + prompt(9), max_tokens=12, sampling=SamplingParams(0.0, **ALL_TOLD)),
        "shared 2": make_sequence(0, shared + prompt(40), max_tokens=12, sampling=SamplingParams(**drawn, **ALL_TOLD)),
        "long": make_sequence(0, prompt(150), max_tokens=20, sampling=SamplingParams(0.0, **ALL_TOLD)),
    }


def _runner(model: CausalLM, threads: int) -> ModelRunner:
    kv_cache = KVCache.allocate(model.config, LIMITS.num_blocks, LIMITS.block_size, model.dtype, CPU)
    for tensor in (*kv_cache.keys, *kv_cache.values):
        tensor.fill_(float("nan"))
    return ModelRunner(model, kv_cache, Sampler(build_kernels("cpu", threads)), LIMITS)


class _Recorder:
    """Runs steps, and keeps the bits of every logprob by sequence: its prompt's, and its output's in order."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._names: dict[int, str] = {}
        self.driver = Driver(self._run, LIMITS)
        self.prompts: dict[str, dict[int, bytes]] = {}
        self.outputs: Bits = {}

    def _run(self, batch: StepBatch) -> StepResult:
        for sequence in batch.new_sequences:
            self._names[sequence.handle] = self.driver._stays[sequence.handle].key
        result = self._runner.run(batch)
        for row, told in result.logprobs.items():
            bits = np.float32(told.sampled).tobytes() + told.top_logprobs.tobytes() + told.top_token_ids.tobytes()
            self.outputs.setdefault(self._names[result.handles[row]], []).append(bits)
        for row, prompt in result.prompt_logprobs.items():
            kept = self.prompts.setdefault(self._names[result.handles[row]], {})
            for index, logprob in enumerate(prompt.logprobs):
                bits = logprob.tobytes() + prompt.top_logprobs[index].tobytes()
                assert kept.setdefault(prompt.first_token_index + index, bits) == bits
        return result


def _alone(model: CausalLM, key: str) -> _Recorder:
    recorder = _Recorder(_runner(model, 1))
    recorder.driver.add(key, _sequences()[key])
    recorder.driver.finish()
    return recorder


@pytest.fixture(name="alone", scope="module")
def _each_alone(model: CausalLM) -> dict[str, _Recorder]:
    """Every sequence by itself, its prompt in one piece, on one thread."""
    return {key: _alone(model, key) for key in _sequences()}


def _assert_equal(recorder: _Recorder, alone: dict[str, _Recorder]) -> None:
    for key, expected in alone.items():
        assert recorder.driver.outputs[key] == expected.driver.outputs[key], key
        assert recorder.outputs[key] == expected.outputs[key], key
        assert recorder.prompts.get(key) == expected.prompts.get(key), key


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("chunk", [200, 64, 16, 7])
def test_company_and_chunks_change_no_bit(
    model: CausalLM, alone: dict[str, _Recorder], threads: int, chunk: int
) -> None:
    """All together, prompts in pieces of any size, on any number of threads."""
    recorder = _Recorder(_runner(model, threads))
    recorder.driver._chunk = chunk
    for key, sequence in _sequences().items():
        recorder.driver.add(key, sequence)
    recorder.driver.finish()
    _assert_equal(recorder, alone)


def test_preemption_changes_no_bit(model: CausalLM, alone: dict[str, _Recorder]) -> None:
    """Preempted in prefill and in decode and computed again from the full record, in other company."""
    recorder = _Recorder(_runner(model, 2))
    recorder.driver._chunk = 50
    for key, sequence in _sequences().items():
        recorder.driver.add(key, sequence)
    for step in range(16):
        if step in (1, 6):
            recorder.driver.preempt("long")
        if step in (3, 9, 12):
            recorder.driver.preempt("shared 2")
        recorder.driver.step()
    recorder.driver.finish()
    _assert_equal(recorder, alone)


def test_a_cached_prefix_changes_no_bit(model: CausalLM, alone: dict[str, _Recorder]) -> None:
    """A prompt whose first 32 tokens another sequence has computed goes on from them as if it had."""
    runner = _runner(model, 2)
    first, second = _sequences()["shared 1"], _sequences()["shared 2"]
    prompt = len(first.token_ids)
    one = replace(first, handle=1, stopping=replace(first.stopping, max_tokens=1))
    assert runner.run(StepBatch(1, 1, (), (one,), (1,), (prompt,), (0,), (3,), (1, 2, 3))).failure is None
    told = replace(second.sampling, prompt_logprobs_from=33)
    two = replace(second, handle=2, num_cached_tokens=32, sampling=told)
    num_tokens = len(second.token_ids)
    num_blocks = -(-num_tokens // LIMITS.block_size)
    blocks = (1, 2, *range(10, 10 + num_blocks - 2))
    result = runner.run(StepBatch(1, 2, (1,), (two,), (2,), (num_tokens - 32,), (32,), (num_blocks,), blocks))
    assert result.failure is None
    expected = alone["shared 2"]
    (output,) = result.logprobs.values()
    bits = np.float32(output.sampled).tobytes() + output.top_logprobs.tobytes() + output.top_token_ids.tobytes()
    assert bits == expected.outputs["shared 2"][0]
    (prompt_told,) = result.prompt_logprobs.values()
    for index, logprob in enumerate(prompt_told.logprobs):
        place = prompt_told.first_token_index + index
        bits = logprob.tobytes() + prompt_told.top_logprobs[index].tobytes()
        assert bits == expected.prompts["shared 2"][place]
