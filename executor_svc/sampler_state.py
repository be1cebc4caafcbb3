"""What sampling must know of every live stay: a function of its record, kept up to date token by token.

Columns are indexed by slot (see `sequence_state`). Only sequences that use penalties or min_tokens keep anything
beyond their parameters, so a plain sequence costs nothing per step.
"""

from __future__ import annotations

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
    ]
)
"""A row of sampling parameters; top_logprobs is -1 where no logprobs are wanted."""


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


class SamplerState:
    """The sampler's view of every live stay."""

    def __init__(self, capacity: int) -> None:
        self.parameters = np.zeros(capacity, dtype=PARAMETERS)
        """[capacity], by slot."""
        self.counts: dict[int, TokenCounts] = {}
        """By slot, of the sequences that use penalties."""
        self.masked_stops: dict[int, MaskedStops] = {}
        """By slot, of the sequences with fewer than min_tokens output tokens."""

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

    def remove(self, slot: int) -> None:
        """Forget a slot."""
        self.counts.pop(slot, None)
        self.masked_stops.pop(slot, None)

    def append(self, slots: list[int], token_ids: list[int]) -> None:
        """Take in one sampled token for each of `slots`."""
        if not (self.counts or self.masked_stops):
            return
        for slot, token_id in zip(slots, token_ids, strict=True):
            counts = self.counts.get(slot)
            if counts is not None:
                counts.add(token_id)
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
    )
