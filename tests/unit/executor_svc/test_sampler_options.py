"""Every option of sampling through the sampler and its state, against transformers' processors in their order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fakes_executor import make_history, make_sequence
from processed import chi_square_excess, expected_token, processed_probabilities

from executor_svc.batch import NewSequence, SamplingParams
from executor_svc.kernels import build_kernels
from executor_svc.kernels.noise.reference import uniform_numbers as uniform
from executor_svc.sampler import Sampler
from executor_svc.sampler_state import SamplerState

SETS = pytest.mark.parametrize("kernels", ["reference", "cpu"])
BIAS = {"bias_token_ids": (3, 5, 8, 0), "bias_values": (4.0, -100.0, 1.5, -1.5)}
WORDS = {"bad_words": ((2,), (7, 1), (1, 7, 9), (4, 4), (4, 4, 4, 6), (30,))}
OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.08},
    "typical_p": {"typical_p": 0.6},
    "bias": BIAS,
    "bad_words": WORDS,
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": -0.3},
    "bias and penalties": {**BIAS, "repetition_penalty": 0.6, "frequency_penalty": 1.1},
    "filters": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.03, "typical_p": 0.8},
    "everything": {
        **BIAS,
        **WORDS,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "temperature": 1.5,
        "top_k": 25,
        "top_p": 0.95,
        "min_p": 0.01,
        "typical_p": 0.9,
    },
}


def _sample(
    kernels: str, logits: torch.Tensor, sequences: list[NewSequence]
) -> tuple[list[int], list[float], dict[int, Any]]:
    """One token for each sequence, a row of logits each; tokens, the noise they were drawn with, logprobs."""
    state = SamplerState(len(sequences))
    for slot, sequence in enumerate(sequences):
        state.add(slot, sequence)
    positions = np.array([len(sequence.token_ids) for sequence in sequences])
    slots = np.arange(len(sequences))
    tokens, logprobs = Sampler(build_kernels(kernels)).sample(
        logits.clone(), state, slots, positions, make_history(sequences)
    )
    noise = uniform(state.parameters["seed"], state.parameters["choice"], positions)
    return tokens.tolist(), noise.tolist(), logprobs


def _records(vocab: int, count: int, rng: np.random.Generator, **params: Any) -> list[NewSequence]:
    """Records with prompts and outputs of few distinct tokens, so that penalties and bad words find them."""
    records = []
    for handle in range(1, count + 1):
        tokens = rng.choice([1, 4, 7, 9 % vocab, int(rng.integers(vocab))], size=int(rng.integers(1, 14))).tolist()
        num_prompt = int(rng.integers(1, len(tokens) + 1))
        sampling = SamplingParams(**{"temperature": 1.0, "seed": int(rng.integers(1 << 62)), **params})
        records.append(
            make_sequence(
                handle,
                tokens,
                num_prompt_tokens=num_prompt,
                sampling=sampling,
                max_tokens=64,
                min_tokens=int(rng.integers(0, 20)),
                stop_token_ids=(6, 10),
            )
        )
    return records


@SETS
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("scale", [0.5, 3.0, 30.0])
def test_row_by_row_as_in_transformers(kernels: str, option: str, scale: float) -> None:
    """Each of 40 rows, with its own history, logits and noise, draws the token that the noise picks from the
    distribution that transformers' processors give: the option alone, and all of them in their order.
    """
    rng = np.random.default_rng(int(scale * 10))
    vocab = 70
    records = _records(vocab, 40, rng, **OPTIONS[option])
    logits = torch.from_numpy(rng.normal(size=(40, vocab)) * scale).float()
    tokens, noise, _ = _sample(kernels, logits, records)
    compared = 0
    for row, record in enumerate(records):
        expected = expected_token(processed_probabilities(logits[row], record), noise[row])
        if expected is not None:
            assert tokens[row] == expected, f"row {row}: {record}"
            compared += 1
    assert compared > 30


@SETS
@pytest.mark.parametrize("vocab", [12, 400])
def test_a_batch_of_all_kinds_as_in_transformers(kernels: str, vocab: int) -> None:
    """Rows of every option side by side, in a tiny and a larger vocabulary, each draw as by themselves there."""
    rng = np.random.default_rng(vocab)
    records = []
    for params in OPTIONS.values():
        inside = dict(params)
        if "bad_words" in inside:
            inside["bad_words"] = tuple(word for word in inside["bad_words"] if max(word) < vocab)
        records += _records(vocab, 5, rng, **inside)
    logits = torch.from_numpy(rng.normal(size=(len(records), vocab)) * 2).float()
    tokens, noise, _ = _sample(kernels, logits, records)
    for row, record in enumerate(records):
        expected = expected_token(processed_probabilities(logits[row], record), noise[row])
        assert expected is None or tokens[row] == expected, f"row {row}: {record}"


@SETS
@pytest.mark.parametrize("option", ["bias", "bad_words", "penalties", "min_p", "typical_p", "temperature"])
def test_ties_as_in_transformers(kernels: str, option: str) -> None:
    """Rows of few distinct logits, where many tokens are equal."""
    rng = np.random.default_rng(3)
    records = _records(50, 40, rng, **OPTIONS[option])
    logits = torch.from_numpy(rng.integers(-2, 3, size=(40, 50)) * 0.75).float()
    tokens, noise, _ = _sample(kernels, logits, records)
    for row, record in enumerate(records):
        expected = expected_token(processed_probabilities(logits[row], record), noise[row])
        assert expected is None or tokens[row] == expected, f"row {row}: {record}"


@SETS
@pytest.mark.parametrize("option", OPTIONS)
def test_greedy_takes_the_best_that_is_left(kernels: str, option: str) -> None:
    """At temperature 0 the token is the likeliest under bias, penalties and masks; the filters have no effect."""
    rng = np.random.default_rng(8)
    params = {**OPTIONS[option], "temperature": 0.0}
    records = _records(70, 30, rng, **params)
    logits = torch.from_numpy(rng.normal(size=(30, 70)) * 3).float()
    tokens, _, _ = _sample(kernels, logits, records)
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
    for row, record in enumerate(records):
        plain = replace(record, sampling=replace(record.sampling, **off))
        assert tokens[row] == int(processed_probabilities(logits[row], plain).argmax())


@SETS
@pytest.mark.parametrize("option", OPTIONS)
def test_draws_follow_the_processed_softmax(kernels: str, option: str) -> None:
    """Over thousands of draws at one seed the counts are those of transformers' processed distribution: Pearson's
    chi-square stays below its 99.9th percentile.
    """
    count = 8000 if kernels == "cpu" else 3000
    rng = np.random.default_rng(17)
    logits = torch.from_numpy(rng.normal(size=40) * 1.5).float()
    params = SamplingParams(**{"temperature": 1.0, "seed": 2024, **OPTIONS[option]})
    record = make_sequence(
        1,
        [5, 7, 7, 1, 4, 4],
        num_prompt_tokens=2,
        sampling=params,
        max_tokens=64,
        min_tokens=9,
        stop_token_ids=(6, 10),
    )
    # The same sequence as many choices of one request: each has noise of its own.
    tokens, _, _ = _sample(kernels, logits.repeat(count, 1), [replace(record, choice=each) for each in range(count)])
    counts = torch.bincount(torch.tensor(tokens), minlength=40)
    probabilities = processed_probabilities(logits, record)
    assert chi_square_excess(counts, probabilities) < 0
    # The same counts are not believed of a distribution that is a little warmer.
    if int((probabilities > 0).sum()) > 3:
        warmer = torch.where(probabilities > 0, probabilities**0.8, 0)
        assert chi_square_excess(counts, warmer / warmer.sum()) > 0


@SETS
@pytest.mark.parametrize("option", OPTIONS)
def test_logprobs_are_of_the_raw_distribution(kernels: str, option: str) -> None:
    """Whatever the options, the reported logprobs are those of the logits as the model gave them."""
    rng = np.random.default_rng(4)
    records = _records(70, 6, rng, **OPTIONS[option], top_logprobs=5)
    logits = torch.from_numpy(rng.normal(size=(6, 70))).float()
    tokens, _, logprobs = _sample(kernels, logits, records)
    expected = torch.log_softmax(logits, dim=-1)
    for row in range(6):
        assert logprobs[row].sampled == pytest.approx(float(expected[row, tokens[row]]), abs=1e-5)
        assert logprobs[row].top_token_ids.tolist() == expected[row].topk(5).indices.tolist()


@SETS
@pytest.mark.parametrize("value", [3.4e38, 1e30, 100.0, -100.0, -1e30, -3.4e38])
@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0])
def test_extreme_biases(kernels: str, value: float, temperature: float) -> None:
    """A bias of any finite size gives a token and no NaN: far up it is the token's own, far down another's."""
    params = SamplingParams(temperature=temperature, bias_token_ids=(2,), bias_values=(value,), top_p=0.9)
    filtered = replace(params, typical_p=0.9, repetition_penalty=1e-38)
    records = [make_sequence(handle, [2, 3], sampling=each) for handle, each in enumerate((params, filtered), 1)]
    tokens, _, _ = _sample(kernels, torch.randn(2, 9, generator=torch.Generator().manual_seed(1)), records)
    assert [token == 2 for token in tokens] == [value > 0] * 2


@SETS
def test_longer_bad_words_give_way_to_the_last_token(kernels: str) -> None:
    """Where bad words of two tokens complete on all that single ones and min_tokens leave, they give way for that
    token; the others hold.
    """
    after_three = tuple((3, token) for token in range(6))
    params = SamplingParams(temperature=1.0, seed=5, bad_words=((0,), *after_three))
    records = [
        make_sequence(1, [1, 3], num_prompt_tokens=1, sampling=params, min_tokens=4, stop_token_ids=(1, 2)),
        make_sequence(2, [1, 3], num_prompt_tokens=1, sampling=replace(params, bad_words=((0,), *after_three[:5]))),
    ]
    for seed in range(30):
        logits = torch.randn(2, 6, generator=torch.Generator().manual_seed(seed))
        tokens, _, _ = _sample(kernels, logits, records)
        assert tokens[0] in (3, 4, 5)
        assert tokens[1] == 5


@SETS
def test_options_touch_their_own_rows(kernels: str) -> None:
    """A plain row between rows of every option draws what it draws alone."""
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.normal(size=(3, 70))).float()
    plain = _records(70, 1, rng)[0]
    around = _records(70, 2, rng, **OPTIONS["everything"])
    alone, _, _ = _sample(kernels, logits[1:2], [plain])
    together, _, _ = _sample(kernels, logits, [around[0], plain, around[1]])
    assert together[1] == alone[0]
