"""How likely a continuation is, read from the logprobs of a prompt that ends with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from gateway.logprob_record import PromptLogprobRecord
from gateway.requests import ContinuationScore, SamplingParams, StoppingParams
from octavo.rpc.logprobs import unpack_floats, unpack_ids

_SAMPLING = SamplingParams(
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    seed=0,
    top_logprobs=None,
    # The likeliest token at each place tells whether greedy generation would write the continuation.
    prompt_logprobs=1,
)
STOPPING = StoppingParams(max_tokens=0, min_tokens=0, stop_token_ids=())
"""When what is scored stops: nothing is generated."""


def sampling_of(num_before: int) -> SamplingParams:
    """Return how a continuation behind so many tokens, at least 1, is run.

    Only the continuation is asked about, so that those of one input share its KV: it is computed once for all of them.
    """
    return replace(_SAMPLING, prompt_logprobs_from=num_before)


def score_of(record: PromptLogprobRecord, num_before: int, token_ids: Sequence[int]) -> ContinuationScore:
    """Return the score of `token_ids`, which stand behind the first `num_before` tokens of the record's prompt."""
    columns = record.slice(num_before, num_before + len(token_ids))
    logprobs = unpack_floats(columns.sampled)
    return ContinuationScore(
        logprob=math.fsum(logprobs),
        token_ids=token_ids,
        logprobs=logprobs,
        is_greedy=unpack_ids(columns.top_token_ids) == tuple(token_ids),
    )
