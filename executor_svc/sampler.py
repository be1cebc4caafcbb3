"""From logits to tokens: bias, penalties, bad words, min_tokens, the draw, logprobs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executor_svc.batch import TokenLogprobs
from executor_svc.kernels import KernelSet
from executor_svc.kernels.logprobs import GatherLogprobs
from executor_svc.kernels.philox import uniform
from executor_svc.kernels.sampling import GREEDY_TEMPERATURE
from executor_svc.sampler_state import SamplerState

Ints = npt.NDArray[np.int64]


class Sampler:
    """Samples one token for each of N rows. Reads the sampler state, never changes it."""

    def __init__(self, kernels: KernelSet) -> None:
        self._kernels = kernels

    @property
    def gather_logprobs(self) -> GatherLogprobs:
        """The op that all logprobs come from."""
        return self._kernels.gather_logprobs

    def sample(
        self, logits: Tensor, state: SamplerState, slots: Ints, positions: Ints
    ) -> tuple[Ints, dict[int, TokenLogprobs]]:
        """Return the tokens, int64 [N], and by index in N the logprobs of the rows that want them.

        logits is float32 [N, V], finite, and is overwritten; slots is [N]; positions [N] are the indices in their
        sequences that the sampled tokens will have.
        """
        parameters = state.parameters[slots]
        wants_logprobs = np.flatnonzero(parameters["top_logprobs"] >= 0)
        raw = logits[torch.from_numpy(wants_logprobs)] if len(wants_logprobs) else None
        if state.biases:
            self._add_bias(logits, state, slots)
        if state.counts:
            self._apply_penalties(logits, state, slots, parameters)
        if state.bad_words or state.masked_stops:
            _forbid(logits, state, slots)
        token_ids = self._draw(logits, parameters, positions)
        if raw is None:
            return token_ids, {}
        return token_ids, self._logprobs(raw, token_ids, wants_logprobs, parameters["top_logprobs"])

    def _add_bias(self, logits: Tensor, state: SamplerState, slots: Ints) -> None:
        biased = [(row, state.biases[slot]) for row, slot in enumerate(slots.tolist()) if slot in state.biases]
        if not biased:
            return
        sizes = [len(bias.token_ids) for _, bias in biased]
        self._kernels.add_logit_bias(
            logits,
            rows=torch.from_numpy(np.repeat([row for row, _ in biased], sizes)),
            token_ids=torch.from_numpy(np.concatenate([bias.token_ids for _, bias in biased])),
            values=torch.from_numpy(np.concatenate([bias.values for _, bias in biased])),
        )

    def _apply_penalties(
        self, logits: Tensor, state: SamplerState, slots: Ints, parameters: npt.NDArray[np.void]
    ) -> None:
        seen = [(row, state.counts[slot]) for row, slot in enumerate(slots.tolist()) if slot in state.counts]
        if not seen:
            return
        sizes = [len(counts.token_ids) for _, counts in seen]
        self._kernels.apply_penalties(
            logits,
            rows=torch.from_numpy(np.repeat([row for row, _ in seen], sizes)),
            token_ids=torch.from_numpy(np.concatenate([counts.token_ids for _, counts in seen])),
            output_counts=torch.from_numpy(np.concatenate([counts.counts for _, counts in seen])),
            repetition=_column(parameters, "repetition"),
            presence=_column(parameters, "presence"),
            frequency=_column(parameters, "frequency"),
        )

    def _draw(self, logits: Tensor, parameters: npt.NDArray[np.void], positions: Ints) -> Ints:
        random = parameters["temperature"] >= GREEDY_TEMPERATURE
        noise = np.zeros(len(parameters), dtype=np.float64)
        if random.any():
            drawn = parameters[random]
            noise[random] = uniform(drawn["seed"], drawn["choice"], positions[random])
        token_ids: Ints = self._kernels.sample_tokens(
            logits,
            temperature=_column(parameters, "temperature"),
            top_k=_column(parameters, "top_k"),
            top_p=_column(parameters, "top_p"),
            min_p=_column(parameters, "min_p"),
            typical_p=_column(parameters, "typical_p"),
            uniform=torch.from_numpy(noise),
        ).numpy()
        return token_ids

    def _logprobs(self, raw: Tensor, token_ids: Ints, rows: Ints, num_top: Ints) -> dict[int, TokenLogprobs]:
        wanted = num_top[rows]
        sampled, top_ids, top = self._kernels.gather_logprobs(raw, torch.from_numpy(token_ids[rows]), int(wanted.max()))
        columns = zip(rows.tolist(), sampled.tolist(), top_ids.numpy(), top.numpy(), wanted.tolist(), strict=True)
        return {row: TokenLogprobs(logprob, ids[:count], tops[:count]) for row, logprob, ids, tops, count in columns}


def _forbid(logits: Tensor, state: SamplerState, slots: Ints) -> None:
    """Make the logits of tokens that may not come next negative infinity."""
    forbidden: list[tuple[int, Ints]] = []
    for row, slot in enumerate(slots.tolist()):
        stops, words = state.masked_stops.get(slot), state.bad_words.get(slot)
        held = [] if stops is None else [stops.token_ids]
        if words is not None:
            held.append(words.always)
            if _leave_one([*held, words.completing], logits.shape[1]):
                held.append(words.completing)
        forbidden.extend((row, token_ids) for token_ids in held)
    if forbidden:
        rows = np.repeat([row for row, _ in forbidden], [len(token_ids) for _, token_ids in forbidden])
        token_ids = np.concatenate([token_ids for _, token_ids in forbidden])
        logits[torch.from_numpy(rows), torch.from_numpy(token_ids)] = float("-inf")


def _leave_one(forbidden: list[Ints], vocab: int) -> bool:
    """Whether a token is left.

    A record that forbids every token for good, or until min_tokens, is refused (see record_check). Longer bad words can
    do so for one token, where they complete on all that are left; then they give way.
    """
    return sum(map(len, forbidden)) < vocab or len(np.unique(np.concatenate(forbidden))) < vocab


def _column(parameters: npt.NDArray[np.void], name: str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(parameters[name]))
