"""Whether a NewSequence can run here at all."""

from __future__ import annotations

from math import isfinite

import numpy as np

from executor_svc.batch import Limits, NewSequence, SamplingParams, StoppingParams

MAX_TOP_LOGPROBS = 20
"""Most alternatives a token can be reported with."""
MAX_BAD_WORDS = 1024
"""Most bad words of a sequence."""
MAX_BAD_WORD_TOKENS = 1024
"""Most tokens of a bad word."""


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
    if sequence.num_cached_tokens >= num_tokens or sequence.num_cached_tokens % limits.block_size:
        return f"num_cached_tokens is {sequence.num_cached_tokens} of {num_tokens}, in blocks of {limits.block_size}"
    if tokens.min() < 0 or tokens.max() >= limits.vocab_size:
        return f"a token id is not below {limits.vocab_size}"
    return (
        _problem_with_stopping(sequence.stopping, num_tokens - num_prompt, sequence.token_ids[-1], limits)
        or _problem_with_sampling(sequence.sampling, limits)
        or _problem_with_bias(sequence.sampling, limits)
        or _problem_with_bad_words(sequence, limits)
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
        ("typical_p", sampling.typical_p, 0 < sampling.typical_p <= 1),
        ("repetition_penalty", sampling.repetition_penalty, sampling.repetition_penalty > 0),
        ("presence_penalty", sampling.presence_penalty, True),
        ("frequency_penalty", sampling.frequency_penalty, True),
    )
    for name, value, in_range in ranges:
        if not (isfinite(value) and in_range):
            return f"{name} is {value}"
    most = min(MAX_TOP_LOGPROBS, limits.vocab_size)
    for name, count in (("top_logprobs", sampling.top_logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if count is not None and not 0 <= count <= most:
            return f"{name} is {count}"
    if sampling.top_k < 0 or not 0 <= sampling.seed < 1 << 64:
        return f"top_k is {sampling.top_k}, seed is {sampling.seed}"
    return None


def _problem_with_bias(sampling: SamplingParams, limits: Limits) -> str | None:
    token_ids, values = sampling.bias_token_ids, sampling.bias_values
    if len(token_ids) != len(values):
        return f"{len(values)} biases for {len(token_ids)} tokens"
    if len(set(token_ids)) != len(token_ids):
        return "a token has two biases"
    if any(not 0 <= token < limits.vocab_size for token in token_ids):
        return f"a biased token id is not below {limits.vocab_size}"
    if not all(map(isfinite, values)):
        return "a bias is not finite"
    return None


def _problem_with_bad_words(sequence: NewSequence, limits: Limits) -> str | None:
    words, stopping = sequence.sampling.bad_words, sequence.stopping
    if not words:
        return None
    if len(words) > MAX_BAD_WORDS or max(map(len, words)) > MAX_BAD_WORD_TOKENS:
        return f"more than {MAX_BAD_WORDS} bad words, or one of more than {MAX_BAD_WORD_TOKENS} tokens"
    if not all(words):
        return "a bad word is empty"
    if any(not 0 <= token < limits.vocab_size for word in words for token in word):
        return f"a token id of a bad word is not below {limits.vocab_size}"
    forbidden = {word[0] for word in words if len(word) == 1}
    if len(sequence.token_ids) - sequence.num_prompt_tokens < stopping.min_tokens:
        forbidden |= set(stopping.stop_token_ids)
    return "bad words forbid every token" if len(forbidden) >= limits.vocab_size else None
