"""What transformers makes of logits: its processors, in its order, as the oracle of the sampler."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from executor_svc.batch import NewSequence


class _OutputPenalties(LogitsProcessor):  # type: ignore[misc]
    """Presence and frequency penalties, which transformers has not, on the output alone."""

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self._presence = presence
        self._frequency = frequency
        self._prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.bincount(input_ids[0, self._prompt_length :], minlength=scores.shape[1])
        return scores - self._presence * (counts > 0) - self._frequency * counts


class _OnOutput(LogitsProcessor):  # type: ignore[misc]
    """A processor that is shown the output alone."""

    def __init__(self, processor: LogitsProcessor, prompt_length: int) -> None:
        self._processor = processor
        self._prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        processed: Tensor = self._processor(input_ids[:, self._prompt_length :], scores)
        return processed


def processors_of(sequence: NewSequence) -> LogitsProcessorList:
    """The processors of a record, in the order in which transformers' generate puts them."""
    params, prompt_length = sequence.sampling, sequence.num_prompt_tokens
    chain = LogitsProcessorList()
    if params.bias_token_ids:
        biases = zip(params.bias_token_ids, params.bias_values, strict=True)
        chain.append(SequenceBiasLogitsProcessor([[[token], value] for token, value in biases]))
    if params.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        chain.append(_OutputPenalties(params.presence_penalty, params.frequency_penalty, prompt_length))
    if params.bad_words:
        bad_words = NoBadWordsLogitsProcessor([list(word) for word in params.bad_words])
        chain.append(_OnOutput(bad_words, prompt_length))
    if sequence.stopping.min_tokens and sequence.stopping.stop_token_ids:
        stops = list(sequence.stopping.stop_token_ids)
        chain.append(MinNewTokensLengthLogitsProcessor(prompt_length, sequence.stopping.min_tokens, stops))
    chain.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(MinPLogitsWarper(params.min_p))
    if params.typical_p < 1:
        chain.append(TypicalLogitsWarper(params.typical_p))
    return chain


def processed_probabilities(logits: Tensor, sequence: NewSequence) -> Tensor:
    """float64 [V]: the distribution of the sequence's next token, of raw logits float32 [V]."""
    scores = processors_of(sequence)(torch.tensor([sequence.token_ids]), logits[None].to(torch.float64))
    return torch.softmax(scores[0], dim=-1)


def expected_token(probabilities: Tensor, uniform: float) -> int | None:
    """The inverse of the distribution function in id order; None within 1e-6 of a step, where rounding decides."""
    steps = probabilities.cumsum(0)
    if bool(((steps - uniform).abs() < 1e-6).any()):
        return None
    return int((steps <= uniform).sum())


def chi_square_excess(counts: Tensor, probabilities: Tensor) -> float:
    """How far Pearson's statistic of int64 counts [V] lies above its 99.9th percentile under float64 probabilities [V];
    negative where the counts are believable.

    Tokens that are expected fewer than 5 times are counted as one. Infinite where an impossible token was counted.
    """
    if bool((counts[probabilities == 0] > 0).any()):
        return math.inf
    expected = probabilities * counts.sum()
    rare = expected < 5
    observed = torch.cat((counts[~rare], counts[rare].sum()[None])).to(torch.float64)
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    used = expected > 1
    statistic = float(((observed - expected)[used] ** 2 / expected[used]).sum())
    freedom = int(used.sum()) - 1
    if freedom == 0:
        return -1.0
    # Wilson and Hilferty's approximation of the percentile.
    spread = 2 / (9 * freedom)
    return statistic - freedom * (1 - spread + 3.0902 * spread**0.5) ** 3
