"""Whether a NewSequence can run here at all."""

from __future__ import annotations

from math import isfinite

import numpy as np

from executor_svc.batch import Limits, NewSequence, SamplingParams, StoppingParams

MAX_TOP_LOGPROBS = 20
"""Most alternatives a token can be reported with."""


def problem_with(sequence: NewSequence, limits: Limits) -> str | None:
    """Say what keeps a record from running, or None.

    The services before this one have checked the same; a record that fails here would reach into another sequence's
    memory or break the whole step, so it is checked again where it takes effect.
    """
    tokens = np.array(sequence.token_ids, dtype=np.int64)
    num_prompt, num_tokens = sequence.num_prompt_tokens, len(tokens)
    if not 1 <= num_prompt <= num_tokens:
        return f"num_prompt_tokens is {num_prompt} of {num_tokens} tokens"
    if num_tokens >= limits.max_model_len:
        return f"{num_tokens} tokens leave no room in max_model_len {limits.max_model_len}"
    if tokens.min() < 0 or tokens.max() >= limits.vocab_size:
        return f"a token id is not below {limits.vocab_size}"
    return (
        _problem_with_stopping(sequence.stopping, num_tokens - num_prompt, sequence.token_ids[-1], limits)
        or _problem_with_sampling(sequence.sampling, limits)
        or (None if 0 <= sequence.choice < 1 << 32 else f"choice is {sequence.choice}")
    )


def _problem_with_stopping(stopping: StoppingParams, num_output: int, last_token: int, limits: Limits) -> str | None:
    stops = set(stopping.stop_token_ids)
    if stopping.max_tokens <= num_output:
        return f"it has {num_output} of max_tokens {stopping.max_tokens} output tokens already"
    if num_output > 0 and last_token in stops:
        return f"it has ended with stop token {last_token} already"
    if any(not 0 <= token < limits.vocab_size for token in stops):
        return f"a stop token id is not below {limits.vocab_size}"
    if num_output < stopping.min_tokens and len(stops) >= limits.vocab_size:
        return "min_tokens forbids every token"
    return None


def _problem_with_sampling(sampling: SamplingParams, limits: Limits) -> str | None:
    ranges = (
        ("temperature", sampling.temperature, sampling.temperature >= 0),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1),
        ("min_p", sampling.min_p, 0 <= sampling.min_p <= 1),
        ("repetition_penalty", sampling.repetition_penalty, sampling.repetition_penalty > 0),
        ("presence_penalty", sampling.presence_penalty, True),
        ("frequency_penalty", sampling.frequency_penalty, True),
    )
    for name, value, in_range in ranges:
        if not (isfinite(value) and in_range):
            return f"{name} is {value}"
    if sampling.top_logprobs is not None and not 0 <= sampling.top_logprobs <= min(MAX_TOP_LOGPROBS, limits.vocab_size):
        return f"top_logprobs is {sampling.top_logprobs}"
    if sampling.top_k < 0 or not 0 <= sampling.seed < 1 << 64:
        return f"top_k is {sampling.top_k}, seed is {sampling.seed}"
    return None
