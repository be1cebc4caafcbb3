"""The sampler: what it hands to the ops for each row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fakes_executor import make_history, make_sequence

from executor_svc.batch import NewSequence, SamplingParams
from executor_svc.kernels import KernelSet, build_kernels
from executor_svc.kernels.noise.reference import uniform_numbers as uniform
from executor_svc.kernels.sampling import GREEDY_TEMPERATURE
from executor_svc.sampler import Sampler
from executor_svc.sampler_state import SamplerState

VOCAB = 50


class Recorder:
    """Stands before the ops of a kernel set and keeps their arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, torch.Tensor, dict[str, Any]]] = []
        real = build_kernels("reference")

        def recorded(name: str) -> Any:
            def call(logits: torch.Tensor, *positional: Any, **named: Any) -> Any:
                self.calls.append((name, logits.clone(), {"positional": positional, **named}))
                return getattr(real, name)(logits, *positional, **named)

            return call

        ops = ("add_logit_bias", "apply_penalties", "forbid_tokens", "sample_tokens", "gather_logprobs")
        self.kernels: KernelSet = replace(real, **{name: recorded(name) for name in ops})

    def arguments(self, name: str) -> list[dict[str, Any]]:
        """Of the calls of one op."""
        return [arguments for called, _, arguments in self.calls if called == name]


def _sample(recorder: Recorder, *sequences: NewSequence) -> tuple[list[int], dict[int, Any], torch.Tensor]:
    """Sample one token for each; return tokens, logprobs and the logits before."""
    state = SamplerState(len(sequences))
    for slot, sequence in enumerate(sequences):
        state.add(slot, sequence)
    logits = torch.randn(len(sequences), VOCAB, generator=torch.Generator().manual_seed(1))
    raw = logits.clone()
    positions = np.array([len(sequence.token_ids) for sequence in sequences])
    tokens, logprobs = Sampler(recorder.kernels).sample(
        logits, state, np.arange(len(sequences)), positions, make_history(sequences)
    )
    return tokens.tolist(), logprobs, raw


def test_noise_comes_from_seed_choice_and_place_in_the_sequence() -> None:
    """The draw's number is Philox of (seed, choice, index in prompt and output together)."""
    seed = 2**63 + 5
    random = SamplingParams(temperature=0.8, seed=seed)
    recorder = Recorder()
    _sample(
        recorder,
        make_sequence(1, [1, 2, 3], sampling=random, choice=4),
        make_sequence(2, [1, 2, 3], sampling=SamplingParams(temperature=0, seed=seed)),
        make_sequence(3, [1, 2, 3, 4, 5], num_prompt_tokens=2, sampling=random),
    )
    (call,) = recorder.arguments("sample_tokens")
    expected = uniform(np.full(2, seed, dtype=np.uint64), np.array([4, 0]), np.array([3, 5]))
    assert call["uniform"][[0, 2]].tolist() == expected.tolist()


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_one_threshold_divides_greedy_from_random(kernels: str) -> None:
    """E5: around the contract's 1e-5, to the last float32, a row is drawn exactly where it has noise."""
    assert GREEDY_TEMPERATURE == 1e-5
    epsilon = np.float32(GREEDY_TEMPERATURE)
    below, above = np.nextafter(epsilon, np.float32([0, 1]))
    temperatures = [0.0, float(below), float(epsilon), float(above)]
    params = [SamplingParams(temperature=temperature, seed=3) for temperature in temperatures]
    sequences = [make_sequence(handle, [1], sampling=each) for handle, each in enumerate(params, 1)]
    recorder = Recorder()
    _sample(recorder, *sequences)
    _sample(recorder, *sequences[:2])
    mixed, greedy = recorder.arguments("sample_tokens")
    assert bool((mixed["uniform"][2:] > 0).all())
    assert not greedy["uniform"].any()
    # Of two equal logits a greedy row takes the first, whatever its noise; a random one follows the noise.
    mixed.pop("positional")
    tokens = build_kernels(kernels).sample_tokens(
        torch.zeros(4, 2), **{**mixed, "uniform": torch.full((4,), 0.9, dtype=torch.float64)}
    )
    assert tokens.tolist() == [0, 0, 1, 1]


def test_parameters_reach_their_columns() -> None:
    """Each row's temperature, top_k, top_p, min_p and typical_p arrive in its place, top_k up to its largest value."""
    recorder = Recorder()
    _sample(
        recorder,
        make_sequence(
            1, [1], sampling=SamplingParams(temperature=0.5, top_k=2**32 - 1, top_p=0.25, min_p=0.125, typical_p=0.5)
        ),
        make_sequence(2, [1], sampling=SamplingParams(temperature=2.0, top_k=3, top_p=0.75, min_p=0.0)),
    )
    (call,) = recorder.arguments("sample_tokens")
    assert (call["temperature"].tolist(), call["top_k"].tolist()) == ([0.5, 2.0], [2**32 - 1, 3])
    assert (call["top_p"].tolist(), call["min_p"].tolist()) == ([0.25, 0.75], [0.125, 0.0])
    assert call["typical_p"].tolist() == [0.5, 1.0]


def test_plain_rows_cost_no_further_op() -> None:
    """Rows without bias, penalties, bad words, min_tokens and logprobs make one call, on the logits as they are."""
    recorder = Recorder()
    _, logprobs, raw = _sample(recorder, make_sequence(1, [1]), make_sequence(2, [1], min_tokens=3))
    ((name, logits, _),) = recorder.calls
    assert (name, logprobs) == ("sample_tokens", {})
    assert torch.equal(logits, raw)


def test_penalties_and_masks_touch_their_own_rows() -> None:
    """Penalties reach the rows that have them, with their own strengths, masks the stop tokens of the rows below
    min_tokens; the row between keeps its bits.
    """
    recorder = Recorder()
    penalized = SamplingParams(temperature=0, repetition_penalty=1.5, presence_penalty=0.25, frequency_penalty=-0.5)
    tokens, _, raw = _sample(
        recorder,
        make_sequence(1, [7, 8, 9, 9], num_prompt_tokens=2, sampling=penalized),
        make_sequence(2, [7, 8, 9, 9], num_prompt_tokens=2),
        make_sequence(3, [1], min_tokens=1, stop_token_ids=tuple(range(49))),
    )
    (call,) = recorder.arguments("apply_penalties")
    assert call["slots"].tolist() == [0, 1, 2]
    assert (call["num_prompt_tokens"].tolist(), call["num_tokens"].tolist()) == ([2, 2, 1], [4, 4, 1])
    assert call["tokens"][0, :4].tolist() == [7, 8, 9, 9]
    strengths = [call[name].tolist() for name in ("repetition", "presence", "frequency")]
    assert strengths == [[1.5, 1, 1], [0.25, 0, 0], [-0.5, 0, 0]]
    _, logits, _ = recorder.calls[-1]
    changed = (logits != raw).nonzero().tolist()
    assert changed == [[0, 7], [0, 8], [0, 9], *([2, token] for token in range(49))]
    assert tokens[2] == 49


def test_bias_comes_before_the_penalties() -> None:
    """The bias reaches its rows first, and the penalties see biased logits."""
    recorder = Recorder()
    params = SamplingParams(temperature=0, bias_token_ids=(4, 2), bias_values=(3.0, -2.0), presence_penalty=1.0)
    _, _, raw = _sample(
        recorder,
        make_sequence(1, [1]),
        make_sequence(2, [1, 4], num_prompt_tokens=1, sampling=params),
    )
    (call,) = recorder.arguments("add_logit_bias")
    assert (call["begins"] == call["ends"]).tolist() == [True, False]
    place = slice(int(call["begins"][1]), int(call["ends"][1]))
    assert (call["token_ids"][place].tolist(), call["values"][place].tolist()) == ([4, 2], [3.0, -2.0])
    assert [name for name, _, _ in recorder.calls] == ["add_logit_bias", "apply_penalties", "sample_tokens"]
    _, biased, _ = recorder.calls[1]
    assert torch.equal(biased[1, [4, 2]], raw[1, [4, 2]] + torch.tensor([3.0, -2.0]))
    assert (biased != raw).nonzero().tolist() == [[1, 2], [1, 4]]


def test_logprobs_are_asked_for_once_with_the_widest_row() -> None:
    """Rows that want logprobs share one call over raw logits, as wide as the widest; each keeps only its own number."""
    recorder = Recorder()
    wants = SamplingParams(temperature=0, repetition_penalty=2.0)
    tokens, logprobs, raw = _sample(
        recorder,
        make_sequence(1, [1, 2], sampling=replace(wants, top_logprobs=3)),
        make_sequence(2, [1, 2], sampling=wants),
        make_sequence(3, [1, 2], sampling=replace(wants, top_logprobs=1)),
    )
    (call,) = recorder.arguments("gather_logprobs")
    token_ids, num_top = call["positional"]
    assert (token_ids.tolist(), num_top) == ([tokens[0], tokens[2]], 3)
    assert {row: len(each.top_token_ids) for row, each in logprobs.items()} == {0: 3, 2: 1}
    expected = torch.log_softmax(raw, dim=-1)
    assert logprobs[2].sampled == pytest.approx(float(expected[2, tokens[2]]), abs=1e-5)
    assert logprobs[0].top_token_ids.tolist() == expected[0].topk(3).indices.tolist()
