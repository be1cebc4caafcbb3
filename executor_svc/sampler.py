"""From logits to tokens: bias, penalties, bad words, min_tokens, the draw, logprobs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executor_svc.batch import TokenLogprobs
from executor_svc.kernels import KernelSet
from executor_svc.kernels.finite import FiniteRows
from executor_svc.kernels.logprobs import GatherLogprobs
from executor_svc.kernels.sampling import GREEDY_TEMPERATURE
from executor_svc.sampler_state import SamplerState

Ints = npt.NDArray[np.int64]
_NO_TOKENS: Ints = np.zeros(0, dtype=np.int64)


class Sampler:
    """Samples one token for each of N rows. Reads the sampler state, never changes it."""

    def __init__(self, kernels: KernelSet) -> None:
        self._kernels = kernels

    @property
    def gather_logprobs(self) -> GatherLogprobs:
        """The op that all logprobs come from."""
        return self._kernels.gather_logprobs

    @property
    def finite_rows(self) -> FiniteRows:
        """The op that says which rows can be sampled."""
        return self._kernels.finite_rows

    def sample(
        self, logits: Tensor, state: SamplerState, slots: Ints, positions: Ints, history: npt.NDArray[np.int32]
    ) -> tuple[Ints, dict[int, TokenLogprobs]]:
        """Return the tokens, int64 [N], and by index in N the logprobs of the rows that want them.

        logits is float32 [N, V], finite, and is overwritten; slots is [N]; positions [N] are the indices in their
        sequences that the sampled tokens will have; history is int32 [slots, L], each sequence's tokens before them.
        """
        parameters = state.parameters[slots]
        wants_logprobs = np.flatnonzero(parameters["top_logprobs"] >= 0)
        raw = _rows_of(logits, wants_logprobs, copied=_changes_logits(state)) if len(wants_logprobs) else None
        if state.biases:
            biased, values, begins, ends = map(torch.from_numpy, state.biases.places(slots))
            self._kernels.add_logit_bias(logits, token_ids=biased, values=values, begins=begins, ends=ends)
        if state.penalized:
            self._apply_penalties(logits, parameters, slots, positions, history)
        if state.stops or state.forbidden or state.bad_words:
            self._forbid(logits, state, slots, positions < parameters["min_length"])
        token_ids = self._draw(logits, parameters, positions)
        if raw is None:
            return token_ids, {}
        return token_ids, self._logprobs(raw, token_ids, wants_logprobs, parameters["top_logprobs"])

    @staticmethod
    def takes_likeliest(state: SamplerState, slots: Ints) -> bool:
        """Whether every row takes its likeliest token, as the model gives it, and no more is asked: then no logits are
        needed. slots is [N].
        """
        parameters = state.parameters[slots]
        are_plain = (parameters["temperature"] < GREEDY_TEMPERATURE) & (parameters["top_logprobs"] < 0)
        return bool(are_plain.all()) and not _changes_logits(state)

    def _apply_penalties(
        self,
        logits: Tensor,
        parameters: npt.NDArray[np.void],
        slots: Ints,
        positions: Ints,
        history: npt.NDArray[np.int32],
    ) -> None:
        self._kernels.apply_penalties(
            logits,
            tokens=torch.from_numpy(history),
            slots=torch.from_numpy(slots),
            num_prompt_tokens=_column(parameters, "num_prompt_tokens"),
            num_tokens=torch.from_numpy(positions),
            repetition=_column(parameters, "repetition"),
            presence=_column(parameters, "presence"),
            frequency=_column(parameters, "frequency"),
        )

    def _forbid(self, logits: Tensor, state: SamplerState, slots: Ints, is_short: npt.NDArray[np.bool_]) -> None:
        """Make the logits of tokens that may not come next negative infinity; is_short is [N], before min_tokens."""
        for token_ids, begins, ends in forbidden_places(state, slots, is_short, logits.shape[1]):
            self._forbid_lists(logits, token_ids, begins, ends)

    def _forbid_lists(self, logits: Tensor, token_ids: Ints, begins: Ints, ends: Ints) -> None:
        self._kernels.forbid_tokens(
            logits,
            token_ids=torch.from_numpy(token_ids),
            begins=torch.from_numpy(begins),
            ends=torch.from_numpy(ends),
        )

    def _draw(self, logits: Tensor, parameters: npt.NDArray[np.void], positions: Ints) -> Ints:
        temperature = np.ascontiguousarray(parameters["temperature"])
        if (temperature >= GREEDY_TEMPERATURE).any():
            places = _column(parameters, "seed"), _column(parameters, "choice"), torch.from_numpy(positions)
            noise = self._kernels.uniform(*places)
        else:
            noise = torch.zeros(len(parameters), dtype=torch.float64)
        tokens: Ints = self._kernels.sample_tokens(
            logits,
            temperature=torch.from_numpy(temperature),
            top_k=_column(parameters, "top_k"),
            top_p=_column(parameters, "top_p"),
            min_p=_column(parameters, "min_p"),
            typical_p=_column(parameters, "typical_p"),
            uniform=noise,
        ).numpy()
        return tokens

    def _logprobs(self, raw: Tensor, token_ids: Ints, rows: Ints, num_top: Ints) -> dict[int, TokenLogprobs]:
        wanted = num_top[rows]
        sampled, top_ids, top = self._kernels.gather_logprobs(raw, torch.from_numpy(token_ids[rows]), int(wanted.max()))
        columns = zip(rows.tolist(), sampled.tolist(), top_ids.numpy(), top.numpy(), wanted.tolist(), strict=True)
        return {row: TokenLogprobs(logprob, ids[:count], tops[:count]) for row, logprob, ids, tops, count in columns}


def forbidden_places(
    state: SamplerState, slots: Ints, is_short: npt.NDArray[np.bool_], vocab: int
) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Yield lists of tokens that may not come next, [A], and where those of each row begin and end in them, [N] each.

    is_short is [N], before min_tokens; vocab tokens there are.
    """
    if state.stops and is_short.any():
        token_ids, _, begins, ends = state.stops.places(slots)
        yield token_ids, begins, np.where(is_short, ends, begins)
    if state.forbidden:
        token_ids, _, begins, ends = state.forbidden.places(slots)
        yield token_ids, begins, ends
    if state.bad_words:
        lists = [_completing(state, slot, vocab, short) for slot, short in _pairs(slots, is_short)]
        ends = np.cumsum([len(each) for each in lists])
        yield np.concatenate(lists), np.concatenate(([0], ends[:-1])), ends


def _changes_logits(state: SamplerState) -> bool:
    return bool(state.biases or state.penalized or state.stops or state.forbidden or state.bad_words)


def _rows_of(logits: Tensor, rows: Ints, *, copied: bool) -> Tensor:
    """Return these rows of the logits, themselves where all are wanted and need not be copied."""
    if len(rows) == len(logits) and not copied:
        return logits
    # numpy copies on this thread alone.
    return torch.from_numpy(logits.numpy()[rows])


def _pairs(slots: Ints, is_short: npt.NDArray[np.bool_]) -> Iterator[tuple[int, bool]]:
    return zip(slots.tolist(), is_short.tolist(), strict=True)


def _completing(state: SamplerState, slot: int, vocab: int, is_short: bool) -> Ints:
    """Return the tokens that would complete a longer bad word; none where no other token is left."""
    words = state.bad_words.get(slot)
    if words is None or not len(words.completing):
        return _NO_TOKENS
    stops = state.stops.token_ids_of(slot) if is_short else _NO_TOKENS
    forbidden = [stops, state.forbidden.token_ids_of(slot), words.completing]
    return words.completing if _leave_one(forbidden, vocab) else _NO_TOKENS


def _leave_one(forbidden: list[Ints], vocab: int) -> bool:
    """Whether a token is left.

    A record that forbids every token for good, or until min_tokens, is refused (see record_check). Longer bad words can
    do so for one token, where they complete on all that are left; then they give way.
    """
    return sum(map(len, forbidden)) < vocab or len(np.unique(np.concatenate(forbidden))) < vocab


def _column(parameters: npt.NDArray[np.void], name: str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(parameters[name]))
