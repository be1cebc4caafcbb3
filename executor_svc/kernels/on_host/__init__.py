"""Contract of work on the host in the middle of a step: what ranks compute together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class HostFunction(Protocol):
    """A function that changes a tensor in place."""

    def __call__(self, x: Tensor) -> Tensor:
        """Change x [T, width], contiguous, IN PLACE, and give it back."""


class OnHost(Protocol):
    """Makes a Python function part of a step's body."""

    def __call__(self, function: Callable[[Tensor], None]) -> HostFunction:
        """Give what calls `function`, which changes the tensor it is given in place, wherever a body that is recorded
        comes to it, too. What it raises ends the step.
        """
