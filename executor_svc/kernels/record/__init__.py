"""Contract of recording: the calls of a step's body, written down once and made again without Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from executor_svc.kernels.paged_attention import PagedAttention


class StepBody(Protocol):
    """The part of a step between its inputs and the last hidden states."""

    def __call__(self, inputs: Sequence[Tensor], attention: PagedAttention) -> Tensor:
        """Compute by ops of the kernel set alone, in an order that the shapes of the inputs decide.

        All that changes from step to step lies in the inputs, which are contiguous, and in the attention's plan.
        Weights and KV memory stay where they are for as long as the body lives.
        """


class Record(Protocol):
    """Makes a body that is quicker to call."""

    def __call__(self, body: StepBody) -> StepBody:
        """Give a body with the same results, bit for bit. A result may lie in memory that the next call overwrites.

        It is called by one thread at a time.
        """
