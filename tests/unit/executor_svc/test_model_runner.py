"""Whole sequences over many steps, deep, chunked and preempted, over a model that shows every misplaced token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes_ahead import AheadDriver
from fakes_executor import Driver, RecallModel, make_limits, make_runner, make_sequence
from hypothesis import given
from hypothesis import strategies as st

from executor_svc.batch import (
    Limits,
    NewSequence,
    RowStatus,
    SamplingParams,
    StepBatch,
    StepResult,
)

RANDOM = SamplingParams(temperature=1.0, seed=11)
PENALIZED = SamplingParams(temperature=0.0, repetition_penalty=2.0, presence_penalty=0.3, frequency_penalty=0.4)
CLEAN = SamplingParams(
    temperature=1.2,
    seed=4,
    bias_token_ids=(1, 2, 3, 9),
    bias_values=(9.0, 9.0, 9.0, -50.0),
    bad_words=((7,), (1, 1), (2, 3, 1), (3, 2, 1, 3), (1, 2, 2)),
    prompt_logprobs=3,
)
"""Writes little but 1, 2 and 3, and not the bad words among their runs."""


def _mix() -> dict[str, NewSequence]:
    """Sequences of every sampling kind, prompts around the block size of 4."""
    return {
        "greedy": make_sequence(0, [5, 9, 2], max_tokens=9),
        "greedy4": make_sequence(0, [7, 7, 1, 3], max_tokens=12),
        "penalized": make_sequence(0, [8, 8, 8, 8, 8], sampling=PENALIZED, max_tokens=14),
        "random": make_sequence(0, list(range(17)), sampling=RANDOM, max_tokens=11, choice=3),
        "filtered": make_sequence(
            0, [4], sampling=replace(RANDOM, top_k=20, top_p=0.9, min_p=0.01, frequency_penalty=1.5), max_tokens=13
        ),
        "late": make_sequence(
            0, [1, 2], sampling=RANDOM, max_tokens=20, min_tokens=6, stop_token_ids=tuple(range(0, 60, 2))
        ),
        "typical": make_sequence(0, [6, 6], sampling=replace(RANDOM, typical_p=0.7, top_logprobs=2), max_tokens=10),
        "clean": make_sequence(0, [3, 1, 4, 1, 5], sampling=CLEAN, max_tokens=16, choice=1),
    }


def _driver(
    limits: Limits, *, depth: int = 1, chunk: int = 64, model: RecallModel | None = None, builds_ahead: bool = False
) -> Driver:
    """A driver whose runner checks invariant 5 after every step. builds_ahead: inputs are built in the middle of the
    step before.
    """
    if builds_ahead:
        return AheadDriver(limits, depth=depth, chunk=chunk)
    runner = make_runner(limits, model)

    def run(batch: StepBatch) -> StepResult:
        result = runner.run(batch)
        runner.check_invariants()
        return result

    return Driver(run, limits, depth=depth, chunk=chunk)


def _run_all(sequences: dict[str, NewSequence], limits: Limits, **options: Any) -> dict[str, list[int]]:
    driver = _driver(limits, **options)
    for key, sequence in sequences.items():
        driver.add(key, sequence)
    return driver.finish()


@pytest.fixture(name="undisturbed", scope="module")
def _undisturbed() -> dict[str, list[int]]:
    """The oracle: each sequence alone, whole prompt at once, one step in flight."""
    return {key: _run_all({key: sequence}, make_limits())[key] for key, sequence in _mix().items()}


def test_lengths_and_ends(undisturbed: dict[str, list[int]]) -> None:
    """Sequences end at max_tokens, or at a stop token but not before min_tokens others."""
    assert {key: len(output) for key, output in undisturbed.items() if key != "late"} == {
        "greedy": 9,
        "greedy4": 12,
        "penalized": 14,
        "random": 11,
        "filtered": 13,
        "typical": 10,
        "clean": 16,
    }
    late = undisturbed["late"]
    assert late[-1] % 2 == 0
    assert 6 < len(late) <= 20
    assert all(token % 2 == 1 or token == 60 for token in late[:-1])


def test_bad_words_are_not_written(undisturbed: dict[str, list[int]]) -> None:
    """The output holds none of its bad words, and does without them, though the bias asks for little else."""
    wild = replace(CLEAN, bad_words=())
    free = _run_all({"wild": make_sequence(0, [3, 1, 4, 1, 5], sampling=wild, max_tokens=16, choice=1)}, make_limits())
    assert any(_holds(free["wild"], word) for word in CLEAN.bad_words)
    assert not any(_holds(undisturbed["clean"], word) for word in CLEAN.bad_words)
    assert set(undisturbed["clean"]) & {1, 2, 3}


def _holds(output: list[int], word: tuple[int, ...]) -> bool:
    return any(tuple(output[start : start + len(word)]) == word for start in range(len(output)))


@pytest.mark.parametrize(("depth", "builds_ahead"), [(1, False), (2, False), (3, False), (2, True), (3, True)])
@pytest.mark.parametrize("chunk", [1, 3, 5, 64])
def test_depth_and_chunking_change_no_token(
    undisturbed: dict[str, list[int]], depth: int, chunk: int, *, builds_ahead: bool
) -> None:
    """Batched, chunked, with further steps in flight and inputs built ahead, penalties included: the tokens are those
    of each run alone (C8, C9).
    """
    assert _run_all(_mix(), make_limits(), depth=depth, chunk=chunk, builds_ahead=builds_ahead) == undisturbed


@given(
    depth=st.integers(1, 3),
    chunk=st.integers(1, 9),
    preempted=st.lists(st.tuples(st.integers(0, 25), st.sampled_from(sorted(_mix()))), max_size=6),
    builds_ahead=st.booleans(),
)
def test_recompute_equals_undisturbed(
    undisturbed: dict[str, list[int]], depth: int, chunk: int, preempted: list[tuple[int, str]], *, builds_ahead: bool
) -> None:
    """Preempted anywhere, any number of times, and started again from the full record, no token changes (C6, C7,
    C10).
    """
    driver = _driver(make_limits(num_blocks=50), depth=depth, chunk=chunk, builds_ahead=builds_ahead)
    for key, sequence in _mix().items():
        driver.add(key, sequence)
    for step in range(26):
        for at, key in preempted:
            if at == step:
                driver.preempt(key)
        driver.step()
    assert driver.finish() == undisturbed


def test_rows_behind_an_end_are_skipped() -> None:
    """With three steps in flight the rows sent after a stop token and after max_tokens come back SKIPPED, without a
    token.
    """
    stop = _run_all({"a": make_sequence(0, [5, 9, 2], max_tokens=9)}, make_limits())["a"][3]
    driver = _driver(make_limits(), depth=3)
    driver.add("stop", make_sequence(0, [5, 9, 2], max_tokens=9, stop_token_ids=(stop,)))
    driver.add("length", make_sequence(0, [5, 9, 2], max_tokens=2))
    outputs = driver.finish()
    assert (len(outputs["stop"]), len(outputs["length"])) == (4, 2)
    assert outputs["stop"][-1] == stop
    rows = [row for result in driver.results for row in zip(result.statuses, result.sampled, strict=True)]
    assert rows.count((RowStatus.SKIPPED, None)) == 4
    assert all((status is RowStatus.OK) == (token is not None) for status, token in rows)


def test_choices_of_one_seed_differ_and_repeat() -> None:
    """Four choices of one prompt and seed are distinct, and the same again in another run (E10)."""
    choices = {f"c{i}": make_sequence(0, [3, 4], sampling=RANDOM, choice=i, max_tokens=10) for i in range(4)}
    first = _run_all(choices, make_limits())
    assert len({tuple(tokens) for tokens in first.values()}) == 4
    assert _run_all(choices, make_limits(), depth=2, chunk=1) == first


def test_context_fills_to_max_model_len() -> None:
    """A sequence that may generate for ever ends when prompt and output reach max_model_len, and later rows are
    skipped.
    """
    limits = make_limits(max_model_len=11)
    outputs = _run_all({"a": make_sequence(0, [1, 2, 3], max_tokens=1000)}, limits, depth=2)
    assert len(outputs["a"]) == 8
