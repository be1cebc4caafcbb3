"""Embedding and head whose tokens the ranks divide. To the model they are a Linear as any other."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from executor_svc.kernels.linear import Linear
from executor_svc.parallel.messages import Kind
from executor_svc.parallel.ranks import Ranks


class DividedVocabulary:
    """One rank's tokens. Rows of the embedding come to all ranks, logits to rank 0 alone, which asks for them."""

    def __init__(self, linear: Linear, vocab_size: int, ranks: Ranks) -> None:
        """`linear`: has this rank's rows, of `vocab_size` in all."""
        self._linear = linear
        self._ranks = ranks
        self._vocab_size = vocab_size
        self._first, self._last = ranks.share.of(vocab_size)
        self._width = ranks.share.widest(vocab_size)

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear; no model multiplies by its vocabulary but for logits."""
        raise NotImplementedError

    def weight_rows(self, indices: Tensor) -> Tensor:
        """See Linear. All ranks ask for the same rows, and get them."""
        is_here = (indices >= self._first) & (indices < self._last)
        elsewhere = ~is_here
        # Not torch.where with a number, which it would bring to a device from the host.
        rows = self._linear.weight_rows((indices - self._first).masked_fill_(elsewhere, 0))
        rows.masked_fill_(elsewhere[:, None], 0)
        self._ranks.sum(rows)
        return rows

    def logits(self, x: Tensor) -> Tensor:
        """See Linear."""
        self._ranks.ask(Kind.LOGITS, x)
        parts = self._gather_logits(x)
        ranges = [share.of(self._vocab_size) for share in self._ranks.share.of_all()]
        return torch.cat([part[:, : last - first] for part, (first, last) in zip(parts, ranges, strict=True)], dim=1)

    def likeliest(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """See Linear. The logits stay where they are."""
        self._ranks.ask(Kind.LIKELIEST, x)
        # [ranks, N] each, of which the first rank with the highest logit has the token.
        values, tokens, finite = torch.stack(self._gather_likeliest(x)).unbind(-1)
        best = values.argmax(0, keepdim=True)
        return tokens.gather(0, best)[0].long(), finite.bool().all(0)

    def answer(self, kind: Kind, x: Tensor) -> None:
        """Do this rank's part of what rank 0 asks."""
        if kind is Kind.LOGITS:
            self._gather_logits(x)
        else:
            self._gather_likeliest(x)

    def _gather_logits(self, x: Tensor) -> list[Tensor]:
        logits = self._linear.logits(x)
        missing = self._width - logits.shape[1]
        return self._ranks.gather(functional.pad(logits, (0, missing)) if missing else logits)

    def _gather_likeliest(self, x: Tensor) -> list[Tensor]:
        """Gather float64 [N, 3]: a row's highest logit here, among equals the first, its token, whether all are finite.

        A row that is not finite has any token, but one that exists.
        """
        logits = self._linear.logits(x)
        tokens = logits.argmax(1, keepdim=True)
        finite = logits.isfinite().all(1, keepdim=True)
        values = logits.gather(1, tokens).nan_to_num()
        return self._ranks.gather(torch.cat([values.double(), (tokens + self._first).double(), finite.double()], dim=1))


def divided(embedding: Linear, head: Linear, vocab_size: int, ranks: Ranks) -> tuple[Linear, Linear]:
    """Return embedding and head over all ranks; they stay one where they are."""
    over_all = DividedVocabulary(embedding, vocab_size, ranks)
    return over_all, over_all if head is embedding else DividedVocabulary(head, vocab_size, ranks)
