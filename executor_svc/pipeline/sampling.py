"""From logits to tokens without leaving the device: the order of Sampler, on tensors that are there already.

What a row is sampled by comes with the step's columns. Only lists of tokens (bias, stop tokens before min_tokens, bad
words) are sent by themselves, and only by steps with a sequence that has some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from executor_svc.batch import TokenLogprobs
from executor_svc.device import Device, Pinned
from executor_svc.kernels import KernelSet
from executor_svc.pipeline.columns import DeviceColumns
from executor_svc.sampler import forbidden_places
from executor_svc.sampler_state import SamplerState

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Lists:
    """Lists of tokens by row, on the device: see ForbidTokens and AddLogitBias."""

    token_ids: Tensor
    begins: Tensor
    ends: Tensor
    values: Tensor | None = None


@dataclass(frozen=True)
class Extras:
    """What a step's sampling does beside the draw. Made before the step's tokens are expected."""

    biases: _Lists | None
    is_penalized: bool
    forbidden: Sequence[_Lists]
    wants_logprobs: Ints
    """Which of the N rows."""
    num_top: Ints
    """How many, of these rows."""
    wanted_rows: Tensor | None
    """wants_logprobs on the device; None where there are none."""


@dataclass(frozen=True)
class FetchedLogprobs:
    """Logprobs on their way to the host."""

    rows: Ints
    num_top: Ints
    sampled: Pinned
    top_ids: Pinned
    tops: Pinned

    def read(self) -> dict[int, TokenLogprobs]:
        """Give them by row, once they are there."""
        shape = len(self.rows), int(self.num_top.max())
        sampled = self.sampled.bytes().view(np.float32).tolist()
        top_ids = self.top_ids.bytes().view(np.int64).reshape(shape)
        tops = self.tops.bytes().view(np.float32).reshape(shape)
        columns = zip(self.rows.tolist(), sampled, top_ids, tops, self.num_top.tolist(), strict=True)
        # Copies: the memory is another step's as soon as this one has been told.
        return {row: TokenLogprobs(each, ids[:n].copy(), top[:n].copy()) for row, each, ids, top, n in columns}


class DeviceSampler:
    """Samples one token for each of N rows. Everything is launched on the compute stream."""

    def __init__(self, kernels: KernelSet, device: Device) -> None:
        self._kernels = kernels
        self._device = device

    def extras(self, state: SamplerState, slots: Ints, positions: Ints, vocab: int) -> Extras | None:
        """Give what rows of these slots want beside the draw, None where it is nothing; see Sampler.sample."""
        parameters = state.parameters[slots]
        wants_logprobs = np.flatnonzero(parameters["top_logprobs"] >= 0)
        biases = self._lists(*state.biases.places(slots)) if state.biases else None
        is_short = positions < parameters["min_length"]
        forbidden = [
            self._lists(token_ids, None, begins, ends)
            for token_ids, begins, ends in forbidden_places(state, slots, is_short, vocab)
        ]
        if biases is None and not forbidden and not state.penalized and not len(wants_logprobs):
            return None
        return Extras(
            biases,
            bool(state.penalized),
            forbidden,
            wants_logprobs,
            parameters["top_logprobs"][wants_logprobs],
            self._device.put(wants_logprobs) if len(wants_logprobs) else None,
        )

    def draw(self, logits: Tensor, finite: Tensor, columns: DeviceColumns) -> Tensor:
        """Draw a token for each row of logits float32 [N, V], int64 [N]: of rows that are not finite, any."""
        # Such a row is nobody's: as a greedy one it costs least, and cannot lead a search astray.
        temperature = columns["temperature"].masked_fill(~finite, 0.0)
        return self._kernels.sample_tokens(
            logits,
            temperature=temperature,
            top_k=columns["top_k"],
            top_p=columns["top_p"],
            min_p=columns["min_p"],
            typical_p=columns["typical_p"],
            uniform=self._kernels.uniform(columns["seed"], columns["choice"], columns["sample_positions"]),
        )

    def sample(
        self, logits: Tensor, finite: Tensor, columns: DeviceColumns, extras: Extras, tokens: Tensor
    ) -> tuple[Tensor, FetchedLogprobs | None]:
        """Draw with all that the rows want. Overwrites logits; `tokens` is int32 [slots, L]: what they have so far."""
        wanted_rows = extras.wanted_rows
        raw = None if wanted_rows is None else logits.index_select(0, wanted_rows)
        if (biases := extras.biases) is not None:
            assert biases.values is not None  # extras
            self._kernels.add_logit_bias(
                logits, token_ids=biases.token_ids, values=biases.values, begins=biases.begins, ends=biases.ends
            )
        if extras.is_penalized:
            self._kernels.apply_penalties(
                logits,
                tokens=tokens,
                slots=columns["sample_slots"],
                num_prompt_tokens=columns["num_prompt_tokens"],
                num_tokens=columns["sample_positions"],
                repetition=columns["repetition"],
                presence=columns["presence"],
                frequency=columns["frequency"],
            )
        for lists in extras.forbidden:
            self._kernels.forbid_tokens(logits, token_ids=lists.token_ids, begins=lists.begins, ends=lists.ends)
        drawn = self.draw(logits, finite, columns)
        if raw is None or wanted_rows is None:
            return drawn, None
        wanted = drawn.index_select(0, wanted_rows)
        gathered = self._kernels.gather_logprobs(raw, wanted, int(extras.num_top.max()))
        fetched = [self._device.fetch(each.contiguous()) for each in gathered]
        return drawn, FetchedLogprobs(extras.wants_logprobs, extras.num_top, *fetched)

    def _lists(self, token_ids: Ints, values: npt.NDArray[np.float32] | None, begins: Ints, ends: Ints) -> _Lists:
        put = self._device.put
        return _Lists(put(token_ids), put(begins), put(ends), None if values is None else put(values))
