"""Logprobs of prompt tokens: what they are, who tells them, and how often."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from factories import make_llama
from fakes_executor import Driver, RecallModel, make_limits, make_runner, make_sequence
from reference import Reference

from executor_svc.batch import NewSequence, PromptLogprobs, RowStatus, SamplingParams, StepBatch, StepResult
from executor_svc.kernels import build_kernels
from executor_svc.kv_cache import KVCache
from executor_svc.model_runner import ModelRunner
from executor_svc.models import CausalLM, load_weights
from executor_svc.prompt_scorer import ROWS_AT_ONCE
from executor_svc.sampler import Sampler

LIMITS = make_limits(
    block_size=16, num_blocks=60, max_num_seqs=8, max_num_batched_tokens=250, max_model_len=200, vocab_size=320
)
CPU = torch.device("cpu")
RANDOM = SamplingParams(temperature=1.0, seed=5, top_p=0.95, repetition_penalty=1.3)


def _prompt(length: int, seed: int) -> list[int]:
    return torch.randint(3, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _sequences() -> dict[str, NewSequence]:
    """Prompts of a token, of two, around the block size and past a slice of logits, of every K; some do not ask."""

    def ask(length: int, num_top: int | None, **fields: int) -> NewSequence:
        prompt = _prompt(length, length)
        return make_sequence(0, prompt, sampling=replace(RANDOM, prompt_logprobs=num_top), max_tokens=9, **fields)

    return {
        "1": ask(1, 3),
        "2": ask(2, 0),
        "16": ask(16, 20),
        "silent 17": ask(17, None),
        "33": ask(33, 1),
        "long": ask(2 * ROWS_AT_ONCE + 7, 5),
        "silent long": ask(90, None),
        "resumed": replace(ask(25, 2), num_prompt_tokens=19),
    }


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights on disk."""
    return make_llama(tmp_path_factory.mktemp("models") / "tiny", seed=3)


@pytest.fixture(name="expected", scope="module")
def _expected(folder: Path) -> dict[str, torch.Tensor]:
    """By name of the sequence: row i is transformers' log_softmax after token i of the prompt."""
    reference = Reference.open(folder)
    return {
        name: reference.logprobs(sequence.token_ids[: sequence.num_prompt_tokens])
        for name, sequence in _sequences().items()
    }


@pytest.fixture(name="model", scope="module", params=["reference", "cpu"])
def _model(request: pytest.FixtureRequest, folder: Path) -> tuple[str, CausalLM]:
    """The model under each kernel set."""
    return request.param, load_weights(folder, torch.float32, CPU, build_kernels(request.param))


def _driver(model: tuple[str, CausalLM], *, depth: int = 1, chunk: int = 250) -> Driver:
    kernels, causal_lm = model
    kv_cache = KVCache.allocate(causal_lm.config, LIMITS.num_blocks, LIMITS.block_size, torch.float32, CPU)
    runner = ModelRunner(causal_lm, kv_cache, Sampler(build_kernels(kernels)), LIMITS)

    def run(batch: StepBatch) -> StepResult:
        result = runner.run(batch)
        runner.check_invariants()
        return result

    return Driver(run, LIMITS, depth=depth, chunk=chunk)


def _assert_told(told: list[PromptLogprobs], sequence: NewSequence, expected: torch.Tensor) -> None:
    """Every part says what transformers says of the tokens it names."""
    for part in told:
        assert part.top_token_ids.shape == part.top_logprobs.shape == (len(part.logprobs), _num_top(sequence))
        for place, logprob in enumerate(part.logprobs.tolist()):
            index = part.first_token_index + place
            row = expected[index - 1]
            assert logprob == pytest.approx(float(row[sequence.token_ids[index]]), abs=1e-4)
            ids, tops = part.top_token_ids[place].tolist(), part.top_logprobs[place].tolist()
            assert tops == pytest.approx(row.topk(len(ids)).values.tolist(), abs=1e-4)
            assert tops == pytest.approx(row[ids].tolist(), abs=1e-4)
            assert len(set(ids)) == len(ids)


def _num_top(sequence: NewSequence) -> int:
    assert sequence.sampling.prompt_logprobs is not None
    return sequence.sampling.prompt_logprobs


def _indices(told: list[PromptLogprobs]) -> list[int]:
    return [part.first_token_index + place for part in told for place in range(len(part.logprobs))]


@pytest.mark.parametrize(("depth", "chunk"), [(1, 250), (1, 1), (1, 7), (2, 13), (3, 64), (2, 100)])
def test_equal_transformers(
    model: tuple[str, CausalLM], expected: dict[str, torch.Tensor], depth: int, chunk: int
) -> None:
    """Whatever the chunks and the steps in flight, every prompt token but the first is told once, in order, with
    transformers' log_softmax and its own K; of a prompt of one token nothing, of a resumed output nothing, and nothing
    of who does not ask.
    """
    driver = _driver(model, depth=depth, chunk=chunk)
    sequences = _sequences()
    for name, sequence in sequences.items():
        driver.add(name, sequence)
    driver.finish()
    assert sorted(driver.prompt_logprobs) == ["16", "2", "33", "long", "resumed"]
    for name, told in driver.prompt_logprobs.items():
        assert _indices(told) == list(range(1, sequences[name].num_prompt_tokens))
        assert all(len(part.logprobs) <= chunk for part in told)
        _assert_told(told, sequences[name], expected[name])


@pytest.mark.parametrize(
    ("depth", "chunk", "first"), [(1, 250, 19), (2, 13, 65), (1, 64, 64), (3, 40, 134), (1, 250, 500)]
)
def test_only_what_is_asked_for_is_told(
    model: tuple[str, CausalLM], expected: dict[str, torch.Tensor], depth: int, chunk: int, first: int
) -> None:
    """From the first token that is asked about on each is told once, with the same numbers, wherever chunks end; a
    preempted sequence tells from there again; output tokens are those of who asks about nothing.
    """
    sequences = _sequences()
    long, silent = sequences["long"], sequences["silent long"]
    asking = replace(long, sampling=replace(long.sampling, prompt_logprobs_from=first))
    driver, undisturbed = _driver(model, depth=depth, chunk=chunk), _driver(model)
    driver.add("asking", asking)
    driver.add("silent", silent)
    undisturbed.add("asking", replace(long, sampling=replace(long.sampling, prompt_logprobs=None)))
    undisturbed.add("silent", silent)
    driver.step()
    driver.preempt("asking")
    assert driver.finish() == undisturbed.finish()
    wanted = list(range(first, long.num_prompt_tokens))
    told = driver.prompt_logprobs.get("asking", [])
    _assert_told(told, long, expected["long"])
    indices = _indices(told)
    assert set(indices) == set(wanted)
    assert indices[len(indices) - len(wanted) :] == wanted


def test_recomputed_rows_tell_again(model: tuple[str, CausalLM], expected: dict[str, torch.Tensor]) -> None:
    """Preempted inside its prompt and in its output, a sequence tells its prompt from the start each time, the same
    numbers; its recomputed output is not told, and no output token changes.
    """
    undisturbed = _driver(model)
    driver = _driver(model, depth=2, chunk=9)
    sequences = _sequences()
    for name, sequence in sequences.items():
        undisturbed.add(name, sequence)
        driver.add(name, sequence)
    preempted = {2: "33", 5: "long", 8: "16", 9: "33"}
    for step in range(14):
        if step in preempted:
            driver.preempt(preempted[step])
        driver.step()
    assert driver.finish() == undisturbed.finish()
    for name, told in driver.prompt_logprobs.items():
        _assert_told(told, sequences[name], expected[name])
        indices = _indices(told)
        assert set(indices) == set(range(1, sequences[name].num_prompt_tokens))
        starts = [place for place, index in enumerate(indices) if index == 1]
        assert len(starts) == 1 + list(preempted.values()).count(name)
        for start, end in zip(starts, [*starts[1:], len(indices)], strict=True):
            assert indices[start:end] == list(range(1, end - start + 1))


def _step(sequences: list[NewSequence], **counts: int) -> StepBatch:
    """Step 1: sequences from their start, each in blocks of its own; `h2=3` computes 3 tokens of handle 2."""
    scheduled = [counts.get(f"h{each.handle}", len(each.token_ids)) for each in sequences]
    blocks = [-(-count // 4) for count in scheduled]
    return StepBatch(
        1,
        1,
        new_sequences=tuple(sequences),
        handles=tuple(each.handle for each in sequences),
        num_scheduled_tokens=tuple(scheduled),
        num_computed_tokens=(0,) * len(sequences),
        num_new_blocks=tuple(blocks),
        new_blocks=tuple(range(1, 1 + sum(blocks))),
    )


ASKS = SamplingParams(temperature=0, prompt_logprobs=2)


def test_logits_exist_a_slice_at_a_time() -> None:
    """The model is never asked for more than a slice's rows of prompt logits, all rows' tokens together fill slices,
    and who does not ask costs no row.
    """
    model = RecallModel(61)
    plain, asked = model.compute_logits, []

    def watch(hidden: torch.Tensor) -> torch.Tensor:
        asked.append(len(hidden))
        return plain(hidden)

    model.compute_logits = watch  # type: ignore[method-assign]
    limits = make_limits(max_model_len=120, max_num_batched_tokens=400, num_blocks=120)
    runner = make_runner(limits, model)
    prompts = [[token % 61 for token in range(start, start + 50)] for start in range(4)]
    sequences = [
        make_sequence(handle, prompt, sampling=ASKS if handle > 1 else replace(ASKS, prompt_logprobs=None))
        for handle, prompt in enumerate(prompts, 1)
    ]
    result = runner.run(_step(sequences))
    assert sorted(result.prompt_logprobs) == [1, 2, 3]
    assert asked == [4, ROWS_AT_ONCE, ROWS_AT_ONCE, 3 * 49 - 2 * ROWS_AT_ONCE]
    asked.clear()
    silent = [replace(each, sampling=replace(ASKS, prompt_logprobs=None)) for each in sequences]
    assert make_runner(limits, model).run(_step(silent)).prompt_logprobs == {}
    assert asked == [4]


@pytest.mark.parametrize("where", ["states", "logits", "last logits"])
def test_rows_that_are_not_finite_tell_nothing(where: str) -> None:
    """A row with a state or a logit that is not finite, of a prompt token or of the last, is NAN and tells nothing; its
    neighbours tell and sample as without it (E6, E7).
    """
    model = RecallModel(61, nan_token=60) if where == "states" else RecallModel(61, nan_logits_token=60)
    broken = [7, 8, 60] if where == "last logits" else [7, 60, 8]
    neighbours = [make_sequence(1, [9, 8, 7], sampling=ASKS), make_sequence(3, [5, 5], sampling=ASKS)]
    result = make_runner(make_limits(), model).run(
        _step([neighbours[0], make_sequence(2, broken, sampling=ASKS), neighbours[1]])
    )
    alone = make_runner(make_limits()).run(_step(neighbours))
    assert result.statuses == (RowStatus.OK, RowStatus.NAN, RowStatus.OK)
    assert (result.sampled[0], result.sampled[2]) == alone.sampled
    assert result.sampled[1] is None
    assert sorted(result.prompt_logprobs) == [0, 2]
    for mine, theirs in ((0, 0), (2, 1)):
        assert _same(result.prompt_logprobs[mine], alone.prompt_logprobs[theirs])


def test_only_who_asks_is_judged_by_prompt_logits() -> None:
    """A row that does not ask is sound though logits inside its prompt, which nobody computes, would not be."""
    model = RecallModel(61, nan_logits_token=60)
    silent = make_sequence(2, [7, 60, 8], sampling=replace(ASKS, prompt_logprobs=None))
    assert make_runner(make_limits(), model).run(_step([silent])).statuses == (RowStatus.OK,)


def test_a_chunk_tells_the_token_behind_it() -> None:
    """Of a prompt of 6, the tokens [0, 3) tell 1, 2 and 3; [3, 4) tells 4; [4, 6) tells 5 alone, in a step with
    others that ask and do not.
    """
    runner = make_runner(make_limits())
    sequence = make_sequence(1, [9, 8, 7, 6, 5, 4], sampling=ASKS)
    other = make_sequence(2, [9, 8], sampling=replace(ASKS, prompt_logprobs=None))
    first = runner.run(_step([other, sequence], h1=3))
    assert _indices(list(first.prompt_logprobs.values())) == [1, 2, 3]
    assert list(first.prompt_logprobs) == [1]
    second = runner.run(StepBatch(1, 2, (), (), (1,), (1,), (3,), (0,)))
    assert _indices([second.prompt_logprobs[0]]) == [4]
    third = runner.run(StepBatch(1, 3, (), (), (2, 1), (1, 2), (2, 4), (0, 1), (9,)))
    assert list(third.prompt_logprobs) == [1]
    assert _indices([third.prompt_logprobs[1]]) == [5]
    assert third.sampled[1] is not None
    whole = make_runner(make_limits()).run(_step([sequence])).prompt_logprobs[0]
    parts = [first.prompt_logprobs[1], second.prompt_logprobs[0], third.prompt_logprobs[1]]
    assert np.allclose(np.concatenate([part.logprobs for part in parts]), whole.logprobs, atol=1e-6)
    assert np.concatenate([part.top_token_ids for part in parts]).tolist() == whole.top_token_ids.tolist()
    fourth = runner.run(StepBatch(1, 4, (), (), (1,), (1,), (6,), (0,)))
    assert (fourth.statuses, fourth.prompt_logprobs) == ((RowStatus.OK,), {})


def _same(one: PromptLogprobs, other: PromptLogprobs) -> bool:
    return (
        one.first_token_index == other.first_token_index
        and np.allclose(one.logprobs, other.logprobs, atol=1e-6)
        and one.top_token_ids.tolist() == other.top_token_ids.tolist()
        and np.allclose(one.top_logprobs, other.top_logprobs, atol=1e-6)
    )
