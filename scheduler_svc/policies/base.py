"""The hooks of a scheduling policy."""

from __future__ import annotations


class BaseScheduler:
    """Placeholder of the seam; the hooks follow in the next commit."""
