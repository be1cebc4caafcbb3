"""Penalties, one token at a time."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from executor_svc.kernels.penalties import LARGEST_LOGIT


def apply_penalties(
    logits: Tensor,
    *,
    tokens: Tensor,
    slots: Tensor,
    num_prompt_tokens: Tensor,
    num_tokens: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """See the contract."""
    lengths = zip(slots.tolist(), num_prompt_tokens.tolist(), num_tokens.tolist(), strict=True)
    for row, (slot, num_prompt, length) in enumerate(lengths):
        if repetition[row] == 1 and presence[row] == 0 and frequency[row] == 0:
            continue
        seen = tokens[slot, :length].tolist()
        counts = Counter(seen[num_prompt:])
        for token in {*seen} if repetition[row] != 1 else counts:
            logit = logits[row, token]
            logit = logit / repetition[row] if logit > 0 else logit * repetition[row]
            if counts[token] > 0:
                logit = logit - presence[row]
            logits[row, token] = (logit - frequency[row] * counts[token]).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
