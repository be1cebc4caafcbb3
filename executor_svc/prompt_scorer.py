"""How likely the tokens of a prompt were: the logprobs of those that a step's rows tell.

A row that computes the tokens [a, b) of its sequence has the hidden states that the tokens [a + 1, b + 1) follow from;
of these it tells the prompt's, from the first that is wanted on. Whoever is recomputed tells them again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executor_svc.batch import PromptLogprobs
from executor_svc.input_batch import InputBatch
from executor_svc.kernels.finite import FiniteRows
from executor_svc.kernels.logprobs import GatherLogprobs
from executor_svc.sequence_state import SequenceTable

ROWS_AT_ONCE = 64
"""Rows of logits that exist at a time: a whole chunk's, at 49,152 tokens, would take 100 MB for 512 rows."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Told:
    """What one row tells."""

    row: int
    """Which of the R rows that run."""
    start: int
    """Which of the row's hidden states is the first that counts."""
    first_token_index: int
    num_tokens: int
    num_top: int


class PromptScorer:
    """Scores prompt tokens, of the sequences that want it, a bounded number of rows of logits at a time.

    compute_logits gives the logits, a new float32 [N, V], of hidden [N, H].
    """

    def __init__(
        self,
        compute_logits: Callable[[Tensor], Tensor],
        gather_logprobs: GatherLogprobs,
        finite_rows: FiniteRows,
        table: SequenceTable,
    ) -> None:
        self._compute_logits = compute_logits
        self._gather_logprobs = gather_logprobs
        self._finite_rows = finite_rows
        self._table = table

    def score(self, inputs: InputBatch, hidden: Tensor, sound: npt.NDArray[np.bool_]) -> dict[int, PromptLogprobs]:
        """Return, by index in the batch, what the sound rows tell; hidden is [T, H], sound [R].

        A row whose logits are not finite tells nothing, and is marked in `sound`. To be called before the step's tokens
        count as computed.
        """
        if not self._table.sampler.wanted_prompts:
            return {}
        told = self._told(inputs, sound)
        if not told:
            return {}
        starts = inputs.metadata.query_start
        places = np.concatenate([int(starts[each.row]) + each.start + np.arange(each.num_tokens) for each in told])
        token_ids = np.concatenate([self._tokens(each, inputs) for each in told])
        num_top = max(each.num_top for each in told)
        logprobs, top_ids, tops, finite = self._gather(hidden, places, token_ids, num_top)
        scored: dict[int, PromptLogprobs] = {}
        ends = np.cumsum([each.num_tokens for each in told])
        for each, end in zip(told, ends.tolist(), strict=True):
            part = slice(end - each.num_tokens, end)
            if not finite[part].all():
                sound[each.row] = False
                continue
            scored[int(inputs.rows[each.row])] = PromptLogprobs(
                each.first_token_index, logprobs[part], top_ids[part, : each.num_top], tops[part, : each.num_top]
            )
        return scored

    def _told(self, inputs: InputBatch, sound: npt.NDArray[np.bool_]) -> list[_Told]:
        wanted = self._table.sampler.wanted_prompts
        told = []
        for row, slot in enumerate(inputs.slots.tolist()):
            prompt = wanted.get(slot)
            if prompt is None or not sound[row]:
                continue
            first = max(int(self._table.num_computed_tokens[slot]) + 1, prompt.first_token_index)
            end = min(inputs.metadata.context_lens_host[row] + 1, prompt.num_prompt_tokens)
            if end > first:
                start = first - 1 - int(self._table.num_computed_tokens[slot])
                told.append(_Told(row, start, first, end - first, prompt.num_top))
        return told

    def _tokens(self, told: _Told, inputs: InputBatch) -> Ints:
        end = told.first_token_index + told.num_tokens
        return self._table.tokens[inputs.slots[told.row], told.first_token_index : end].astype(np.int64)

    def _gather(
        self, hidden: Tensor, places: Ints, token_ids: Ints, num_top: int
    ) -> tuple[npt.NDArray[np.float32], Ints, npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        """Return logprobs [M], top ids and logprobs [M, num_top], and which of the M rows of logits are finite."""
        logprobs = np.zeros(len(places), dtype=np.float32)
        top_ids = np.zeros((len(places), num_top), dtype=np.int64)
        tops = np.zeros((len(places), num_top), dtype=np.float32)
        finite = np.zeros(len(places), dtype=bool)
        for start in range(0, len(places), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            logits = self._compute_logits(hidden[torch.from_numpy(places[part])])
            finite[part] = self._finite_rows(logits).numpy()
            # What is not finite is told to nobody; the op wants none of it.
            logits[torch.from_numpy(~finite[part])] = 0
            gathered = self._gather_logprobs(logits, torch.from_numpy(token_ids[part]), num_top)
            logprobs[part], top_ids[part], tops[part] = (each.numpy() for each in gathered)
        return logprobs, top_ids, tops, finite
