"""What sampling must know of every live stay: a function of its record, kept up to date token by token.

Columns are indexed by slot (see `sequence_state`). Only sequences that use min_tokens, a bias, bad words or prompt
logprobs keep anything beyond their parameters, and only bad words of several tokens are kept up to date: penalties are
counted from the tokens themselves.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from executor_svc.batch import NewSequence
from executor_svc.token_lists import TokenLists

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
        ("num_prompt_tokens", np.int64),
        ("min_length", np.int64),
    ],
    align=True,
)
"""A row of what is sampled by; top_logprobs is -1 where no logprobs are wanted, and below min_length tokens, prompt and
output together, stop tokens may not be sampled."""
_NO_TOKENS = np.zeros(0, dtype=np.int64)


class BadWords:
    """The tokens that may not be sampled next, lest the output contain a bad word of two tokens or more.

    Words are looked for in the output alone: one that begins in the prompt is not the output's. Adding a token costs
    as much as there are words that go on from it.
    """

    def __init__(self, words: tuple[tuple[int, ...], ...], output: Sequence[int]) -> None:
        self._by_token: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        for word in set(words):
            self._by_token[word[-2]].append(word)
        longest = max(map(len, words)) - 1
        self._tail = deque(output[-longest:], maxlen=longest)
        self.completing = self._completing()
        """Distinct: the last tokens of the words whose others stand at the output's end."""

    def add(self, token_id: int) -> None:
        """Take in one more output token."""
        self._tail.append(token_id)
        self.completing = self._completing()

    @property
    def progress(self) -> tuple[list[int], list[int]]:
        """The end of the output, as much as the longest word needs, and the tokens that complete a word there."""
        return list(self._tail), self.completing.tolist()

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
        self.penalized: set[int] = set()
        """Slots of the sequences that use penalties."""
        self.biases = TokenLists(capacity)
        """Tokens whose logits are changed, and by how much."""
        self.stops = TokenLists(capacity)
        """Stop tokens of the sequences with min_tokens."""
        self.forbidden = TokenLists(capacity)
        """Bad words of one token."""
        self.bad_words: dict[int, BadWords] = {}
        """By slot, of the sequences that have longer ones."""
        self.wanted_prompts: dict[int, WantedPrompt] = {}
        """By slot, of the sequences that want logprobs of their prompts."""

    @property
    def slots_with_more(self) -> set[int]:
        """Slots that keep more than their parameters."""
        lists = (self.biases.slots, self.stops.slots, self.forbidden.slots)
        return self.penalized.union(*lists, self.bad_words, self.wanted_prompts)

    def grow(self, capacity: int) -> None:
        """Make room for slots up to `capacity`."""
        self.parameters = np.concatenate((self.parameters, np.zeros(capacity - len(self.parameters), dtype=PARAMETERS)))
        for lists in (self.biases, self.stops, self.forbidden):
            lists.grow(capacity)

    def add(self, slot: int, sequence: NewSequence) -> None:
        """Build the state of a record in a free slot."""
        params, stopping = sequence.sampling, sequence.stopping
        self.parameters[slot] = _row(sequence)
        if params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0:
            self.penalized.add(slot)
        if params.bias_token_ids:
            self.biases.put(slot, params.bias_token_ids, params.bias_values)
        if stopping.min_tokens and stopping.stop_token_ids:
            self.stops.put(slot, stopping.stop_token_ids)
        if params.bad_words:
            self._add_bad_words(slot, sequence)
        if params.prompt_logprobs is not None:
            self.wanted_prompts[slot] = WantedPrompt(
                sequence.num_prompt_tokens, params.prompt_logprobs, params.prompt_logprobs_from
            )

    def _add_bad_words(self, slot: int, sequence: NewSequence) -> None:
        words = sequence.sampling.bad_words
        single = tuple(sorted({word[0] for word in words if len(word) == 1}))
        if single:
            self.forbidden.put(slot, single)
        longer = tuple(word for word in words if len(word) > 1)
        if longer:
            self.bad_words[slot] = BadWords(longer, sequence.token_ids[sequence.num_prompt_tokens :])

    def remove(self, slot: int) -> None:
        """Forget a slot."""
        self.penalized.discard(slot)
        for lists in (self.biases, self.stops, self.forbidden):
            lists.drop(slot)
        self.bad_words.pop(slot, None)
        self.wanted_prompts.pop(slot, None)

    def append(self, slots: list[int], token_ids: list[int]) -> None:
        """Take in one sampled token for each of `slots`."""
        if not self.bad_words:
            return
        for slot, token_id in zip(slots, token_ids, strict=True):
            words = self.bad_words.get(slot)
            if words is not None:
                words.add(token_id)

    def check_equal(self, slot: int, record: NewSequence) -> None:
        """Raise AssertionError unless the slot's state is what `record` gives when it is built anew."""
        anew = SamplerState(slot + 1)
        anew.add(slot, record)
        assert self.parameters[slot] == anew.parameters[slot], f"slot {slot}: parameters differ from the record's"
        assert (slot in self.penalized) == (slot in anew.penalized), f"slot {slot}: penalties differ from the record's"
        for name in ("biases", "stops", "forbidden"):
            mine, rebuilt = (getattr(state, name).as_dict(slot) for state in (self, anew))
            assert mine == rebuilt, f"slot {slot}: {name} differ from the record's"
        words, words_anew = self.bad_words.get(slot), anew.bad_words.get(slot)
        assert (words and words.progress) == (words_anew and words_anew.progress), f"slot {slot}: bad words drifted"
        wanted, wanted_anew = self.wanted_prompts.get(slot), anew.wanted_prompts.get(slot)
        assert wanted == wanted_anew, f"slot {slot}: what is wanted of the prompt differs from the record's"


def _row(sequence: NewSequence) -> tuple[float, ...]:
    params, stopping = sequence.sampling, sequence.stopping
    return (
        params.temperature,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        params.top_k,
        params.seed,
        sequence.choice,
        -1 if params.top_logprobs is None else params.top_logprobs,
        params.typical_p,
        sequence.num_prompt_tokens,
        sequence.num_prompt_tokens + stopping.min_tokens,
    )
