"""What sampling must know of every live stay: a function of its record, kept up to date token by token.

Columns are indexed by slot (see `sequence_state`). Only sequences that use penalties, min_tokens, a bias, bad words or
prompt logprobs keep anything beyond their parameters, so a plain sequence costs nothing per step.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from executor_svc.batch import NewSequence, SamplingParams

PARAMETERS = np.dtype(
    [
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("top_k", np.int64),
        ("seed", np.uint64),
        ("choice", np.int64),
        ("top_logprobs", np.int64),
        ("typical_p", np.float32),
    ],
    # torch takes a column only where the row's size is a multiple of the column's.
    align=True,
)
"""A row of sampling parameters; top_logprobs is -1 where no logprobs are wanted."""
_NO_TOKENS = np.zeros(0, dtype=np.int64)


class TokenCounts:
    """The distinct tokens that penalties see in one sequence, and how often its output holds each.

    Prompt tokens count 0. Arrays grow by doubling: adding a token costs the same however long the sequence.
    """

    def __init__(self, prompt: npt.NDArray[np.int64], output: npt.NDArray[np.int64]) -> None:
        distinct = np.unique(prompt)
        self._size = len(distinct)
        self._token_ids = np.resize(distinct, max(16, 2 * self._size)) if self._size else np.zeros(16, dtype=np.int64)
        self._counts = np.zeros(len(self._token_ids), dtype=np.int32)
        self._place = {token: place for place, token in enumerate(distinct.tolist())}
        for token in output.tolist():
            self.add(token)

    def add(self, token_id: int) -> None:
        """Count one more output token."""
        place = self._place.get(token_id)
        if place is None:
            place = self._place[token_id] = self._size
            self._size += 1
            if place == len(self._token_ids):
                self._token_ids = np.resize(self._token_ids, 2 * place)
                self._counts = np.concatenate((self._counts, np.zeros(place, dtype=np.int32)))
            self._token_ids[place] = token_id
        self._counts[place] += 1

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """The distinct tokens, [M]: a view, good until the next add."""
        return self._token_ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        """How often the output holds each, [M]: a view, good until the next add."""
        return self._counts[: self._size]

    def as_dict(self) -> dict[int, int]:
        """Output count by token."""
        return dict(zip(self.token_ids.tolist(), self.counts.tolist(), strict=True))


@dataclass
class MaskedStops:
    """Stop tokens that may not be sampled yet."""

    token_ids: npt.NDArray[np.int64]
    remaining: int
    """Output tokens until they may, at least 1."""


@dataclass(frozen=True)
class LogitBias:
    """Tokens whose logits are changed."""

    token_ids: npt.NDArray[np.int64]
    """Distinct."""
    values: npt.NDArray[np.float32]
    """What is added to each."""


class BadWords:
    """The tokens that may not be sampled next, lest the output contain a bad word.

    Words are looked for in the output alone: one that begins in the prompt is not the output's. Adding a token costs
    as much as there are words that go on from it.
    """

    def __init__(self, words: tuple[tuple[int, ...], ...], output: npt.NDArray[np.int64]) -> None:
        self.always = np.array(sorted({word[0] for word in words if len(word) == 1}), dtype=np.int64)
        """Distinct: the words of one token."""
        self._by_token: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        for word in set(words):
            if len(word) > 1:
                self._by_token[word[-2]].append(word)
        longest = max(map(len, words)) - 1
        self._tail = deque(output[max(0, len(output) - longest) :].tolist(), maxlen=longest)
        self.completing = self._completing()
        """Distinct: the last tokens of the longer words whose others stand at the output's end."""

    def add(self, token_id: int) -> None:
        """Take in one more output token."""
        self._tail.append(token_id)
        self.completing = self._completing()

    @property
    def tail(self) -> list[int]:
        """The end of the output: as much as the longest word needs."""
        return list(self._tail)

    def _completing(self) -> npt.NDArray[np.int64]:
        words = self._by_token.get(self._tail[-1], ()) if self._tail else ()
        tail = tuple(self._tail) if words else ()
        last = {word[-1] for word in words if tail[1 - len(word) :] == word[:-1]}
        return np.array(sorted(last), dtype=np.int64) if last else _NO_TOKENS


@dataclass(frozen=True)
class WantedPrompt:
    """What a sequence wants to know of its prompt."""

    num_prompt_tokens: int
    num_top: int
    first_token_index: int


class SamplerState:
    """The sampler's view of every live stay."""

    def __init__(self, capacity: int) -> None:
        self.parameters = np.zeros(capacity, dtype=PARAMETERS)
        """[capacity], by slot."""
        self.counts: dict[int, TokenCounts] = {}
        """By slot, of the sequences that use penalties."""
        self.masked_stops: dict[int, MaskedStops] = {}
        """By slot, of the sequences with fewer than min_tokens output tokens."""
        self.biases: dict[int, LogitBias] = {}
        """By slot, of the sequences that have one."""
        self.bad_words: dict[int, BadWords] = {}
        """By slot, of the sequences that have some."""
        self.wanted_prompts: dict[int, WantedPrompt] = {}
        """By slot, of the sequences that want logprobs of their prompts."""

    @property
    def slots_with_more(self) -> set[int]:
        """Slots that keep more than their parameters."""
        kept = (self.counts, self.masked_stops, self.biases, self.bad_words, self.wanted_prompts)
        return {slot for each in kept for slot in each}

    def grow(self, capacity: int) -> None:
        """Make room for slots up to `capacity`."""
        self.parameters = np.concatenate((self.parameters, np.zeros(capacity - len(self.parameters), dtype=PARAMETERS)))

    def add(self, slot: int, sequence: NewSequence) -> None:
        """Build the state of a record in a free slot."""
        params, stopping = sequence.sampling, sequence.stopping
        self.parameters[slot] = _row(params, sequence.choice)
        tokens = np.array(sequence.token_ids, dtype=np.int64)
        prompt, output = tokens[: sequence.num_prompt_tokens], tokens[sequence.num_prompt_tokens :]
        if params.repetition_penalty != 1:
            self.counts[slot] = TokenCounts(prompt, output)
        elif params.presence_penalty != 0 or params.frequency_penalty != 0:
            # These two look at the output only.
            self.counts[slot] = TokenCounts(prompt[:0], output)
        remaining = stopping.min_tokens - len(output)
        if remaining > 0 and stopping.stop_token_ids:
            self.masked_stops[slot] = MaskedStops(np.array(stopping.stop_token_ids, dtype=np.int64), remaining)
        if params.bias_token_ids:
            token_ids = np.array(params.bias_token_ids, dtype=np.int64)
            self.biases[slot] = LogitBias(token_ids, np.array(params.bias_values, dtype=np.float32))
        if params.bad_words:
            self.bad_words[slot] = BadWords(params.bad_words, output)
        if params.prompt_logprobs is not None:
            self.wanted_prompts[slot] = WantedPrompt(
                sequence.num_prompt_tokens, params.prompt_logprobs, params.prompt_logprobs_from
            )

    def remove(self, slot: int) -> None:
        """Forget a slot."""
        self.counts.pop(slot, None)
        self.masked_stops.pop(slot, None)
        self.biases.pop(slot, None)
        self.bad_words.pop(slot, None)
        self.wanted_prompts.pop(slot, None)

    def append(self, slots: list[int], token_ids: list[int]) -> None:
        """Take in one sampled token for each of `slots`."""
        if not (self.counts or self.masked_stops or self.bad_words):
            return
        for slot, token_id in zip(slots, token_ids, strict=True):
            counts = self.counts.get(slot)
            if counts is not None:
                counts.add(token_id)
            words = self.bad_words.get(slot)
            if words is not None:
                words.add(token_id)
            masked = self.masked_stops.get(slot)
            if masked is not None:
                masked.remaining -= 1
                if masked.remaining == 0:
                    del self.masked_stops[slot]

    def check_equal(self, slot: int, record: NewSequence) -> None:
        """Raise AssertionError unless the slot's state is what `record` gives when it is built anew."""
        rebuilt = SamplerState(slot + 1)
        rebuilt.add(slot, record)
        assert self.parameters[slot] == rebuilt.parameters[slot], f"slot {slot}: parameters differ from the record's"
        kept, anew = self.counts.get(slot), rebuilt.counts.get(slot)
        assert (kept and kept.as_dict()) == (anew and anew.as_dict()), f"slot {slot}: token counts drifted"
        mask, mask_anew = self.masked_stops.get(slot), rebuilt.masked_stops.get(slot)
        assert (mask and mask.remaining) == (mask_anew and mask_anew.remaining), f"slot {slot}: min_tokens drifted"
        if mask is not None and mask_anew is not None:
            assert mask.token_ids.tolist() == mask_anew.token_ids.tolist(), f"slot {slot}: masked stops drifted"
        assert _bias(self, slot) == _bias(rebuilt, slot), f"slot {slot}: the bias differs from the record's"
        assert _forbidden(self, slot) == _forbidden(rebuilt, slot), f"slot {slot}: bad words drifted"
        wanted, wanted_anew = self.wanted_prompts.get(slot), rebuilt.wanted_prompts.get(slot)
        assert wanted == wanted_anew, f"slot {slot}: what is wanted of the prompt differs from the record's"


def _bias(state: SamplerState, slot: int) -> dict[int, float] | None:
    bias = state.biases.get(slot)
    return None if bias is None else dict(zip(bias.token_ids.tolist(), bias.values.tolist(), strict=True))


def _forbidden(state: SamplerState, slot: int) -> tuple[list[int], ...] | None:
    words = state.bad_words.get(slot)
    return None if words is None else (words.always.tolist(), words.completing.tolist(), words.tail)


def _row(params: SamplingParams, choice: int) -> tuple[float, ...]:
    return (
        params.temperature,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        params.top_k,
        params.seed,
        choice,
        -1 if params.top_logprobs is None else params.top_logprobs,
        params.typical_p,
    )
