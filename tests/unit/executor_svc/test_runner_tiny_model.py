"""The runner over real layers, attention and weights: tiny random models in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import make_llama
from fakes_executor import Driver, make_limits, make_sequence
from torch import Tensor
from transformers import AutoModelForCausalLM

from executor_svc.batch import NewSequence, RowStatus, SamplingParams, StepBatch, StepResult
from executor_svc.kernels import build_kernels
from executor_svc.kv_cache import KVCache
from executor_svc.model_runner import ModelRunner
from executor_svc.models import CausalLM, load_weights
from executor_svc.sampler import Sampler

LIMITS = make_limits(
    block_size=16, num_blocks=40, max_num_seqs=6, max_num_batched_tokens=200, max_model_len=120, vocab_size=320
)
RANDOM = SamplingParams(temperature=1.0, seed=5, top_p=0.95)
CPU = torch.device("cpu")


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights on disk."""
    return make_llama(tmp_path_factory.mktemp("models") / "tiny", seed=3)


@pytest.fixture(name="model", scope="module", params=["reference", "cpu"])
def _model(request: pytest.FixtureRequest, folder: Path) -> tuple[str, CausalLM]:
    """The model under each kernel set."""
    return request.param, load_weights(folder, torch.float32, CPU, build_kernels(request.param))


def _runner(model: tuple[str, CausalLM], *, builds_ahead: bool = False) -> ModelRunner:
    kernels, causal_lm = model
    kv_cache = KVCache.allocate(causal_lm.config, LIMITS.num_blocks, LIMITS.block_size, torch.float32, CPU)
    for tensor in (*kv_cache.keys, *kv_cache.values):
        tensor.fill_(float("nan"))
    return ModelRunner(causal_lm, kv_cache, Sampler(build_kernels(kernels)), LIMITS, builds_ahead=builds_ahead)


def _driver(model: tuple[str, CausalLM], *, depth: int = 1, chunk: int = 200) -> Driver:
    runner = _runner(model)

    def run(batch: StepBatch) -> StepResult:
        result = runner.run(batch)
        runner.check_invariants()
        return result

    return Driver(run, LIMITS, depth=depth, chunk=chunk)


def _sequences() -> dict[str, NewSequence]:
    """Prompts around the block size, every kind of sampling."""
    generator = torch.Generator().manual_seed(0)

    def prompt(length: int) -> list[int]:
        return torch.randint(3, 320, (length,), generator=generator).tolist()

    return {
        "15": make_sequence(0, prompt(15), max_tokens=12),
        "16": make_sequence(0, prompt(16), max_tokens=20, sampling=RANDOM),
        "17": make_sequence(0, prompt(17), max_tokens=16, sampling=SamplingParams(0.0, repetition_penalty=2.0)),
        "33": make_sequence(0, prompt(33), max_tokens=18, sampling=replace(RANDOM, frequency_penalty=1.0), choice=2),
        "1": make_sequence(0, prompt(1), max_tokens=30, sampling=replace(RANDOM, min_p=0.02, top_k=40)),
    }


def _run(model: tuple[str, CausalLM], *, depth: int = 1, chunk: int = 200) -> dict[str, list[int]]:
    driver = _driver(model, depth=depth, chunk=chunk)
    for key, sequence in _sequences().items():
        driver.add(key, sequence)
    return driver.finish()


def test_greedy_equals_transformers(folder: Path, model: tuple[str, CausalLM]) -> None:
    """Greedy rows, with repetition penalty and without, give the tokens of transformers' generate on the same
    weights.
    """
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    outputs = _run(model)
    for key in ("15", "17"):
        sequence = _sequences()[key]
        prompt = torch.tensor([sequence.token_ids])
        expected = theirs.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=sequence.stopping.max_tokens,
            min_new_tokens=sequence.stopping.max_tokens,
            repetition_penalty=sequence.sampling.repetition_penalty,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert outputs[key] == expected[0, len(sequence.token_ids) :].tolist()


@pytest.mark.parametrize(("depth", "chunk"), [(1, 7), (2, 200), (2, 5), (3, 16)])
def test_depth_and_chunking_change_no_token(model: tuple[str, CausalLM], depth: int, chunk: int) -> None:
    """Steps in flight and odd chunks give the tokens of one step at a time with whole prompts (C8, C9)."""
    assert _run(model, depth=depth, chunk=chunk) == _run(model)


@pytest.mark.parametrize(("depth", "chunk"), [(2, 200), (3, 5)])
def test_inputs_and_plans_made_ahead_change_no_token(
    model: tuple[str, CausalLM], depth: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Angles and the plan of attention are made in the middle of the step before, and belong to the step that takes
    them.
    """
    runner = _runner(model, builds_ahead=True)
    used: list[bool] = []
    plain = CausalLM.forward_planned

    def forward_planned(*arguments: Any) -> Tensor:
        hidden = plain(*arguments)
        used.append(runner.ahead is not None and runner.ahead.build_next())
        # Until the next call: what is planned meanwhile must leave it alone.
        return hidden

    monkeypatch.setattr(CausalLM, "forward_planned", forward_planned)
    driver = Driver(runner.run, LIMITS, depth=depth, chunk=chunk, announce=runner.announce)
    for key, sequence in _sequences().items():
        driver.add(key, sequence)
    outputs = driver.finish()
    assert sum(used) > 25
    assert sum(result.timings.ahead is not None for result in driver.results) > 20
    assert outputs == _run(model)


def test_recompute_equals_undisturbed(model: tuple[str, CausalLM]) -> None:
    """Sequences preempted in prefill and in decode, some twice, end with the undisturbed run's tokens (C6, C10)."""
    undisturbed = _run(model)
    driver = _driver(model, depth=2, chunk=9)
    for key, sequence in _sequences().items():
        driver.add(key, sequence)
    preempted = {1: "33", 4: "16", 6: "17", 7: "1", 9: "33", 12: "17", 13: "15"}
    for step in range(14):
        if step in preempted:
            driver.preempt(preempted[step])
        driver.step()
    assert driver.finish() == undisturbed


def test_a_row_of_nan_leaves_its_neighbours_alone(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one token's embedding NaN, a row that reads it is NAN; its neighbours, and whoever gets its blocks, sample
    as alone (E6, E7).
    """
    folder = make_llama(tmp_path_factory.mktemp("models") / "nan", seed=3)
    kernels = build_kernels("cpu")
    sound = load_weights(folder, torch.float32, CPU, kernels)
    broken = load_weights(folder, torch.float32, CPU, kernels)
    embedding = broken._ends.embedding
    whole = embedding.weight_rows

    def weight_rows(indices: Tensor) -> Tensor:
        return whole(indices).masked_fill_((indices == 300)[:, None], float("nan"))

    monkeypatch.setattr(embedding, "weight_rows", weight_rows)

    def start(model: CausalLM, *rows: tuple[int, list[int]]) -> StepResult:
        return _step(_runner(("cpu", model)), 1, *rows)

    neighbours = [(1, [5, 6, 7]), (3, [8, 9, 10])]
    alone = start(sound, *neighbours).sampled
    runner = _runner(("cpu", broken))
    result = _step(runner, 1, neighbours[0], (2, [9, 300, 4]), neighbours[1])
    assert result.statuses == (RowStatus.OK, RowStatus.NAN, RowStatus.OK)
    assert (result.sampled[0], result.sampled[2]) == alone
    reused = _step(runner, 2, (4, [5, 6, 7]), released=(2,), blocks=[2])
    assert reused.sampled == alone[:1]


def _step(
    runner: ModelRunner,
    step: int,
    *rows: tuple[int, list[int]],
    released: tuple[int, ...] = (),
    blocks: list[int] | None = None,
) -> StepResult:
    """Start sequences of up to 16 tokens, each in one block: its handle, or as given."""
    return runner.run(
        StepBatch(
            1,
            step,
            released,
            tuple(make_sequence(handle, tokens) for handle, tokens in rows),
            handles=tuple(handle for handle, _ in rows),
            num_scheduled_tokens=tuple(len(tokens) for _, tokens in rows),
            num_computed_tokens=(0,) * len(rows),
            num_new_blocks=(1,) * len(rows),
            new_blocks=tuple(blocks or [handle for handle, _ in rows]),
        )
    )
