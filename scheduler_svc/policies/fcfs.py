"""First come, first served."""

from __future__ import annotations

from scheduler_svc.policies.base import BaseScheduler


class FcfsScheduler(BaseScheduler):
    """Oldest first."""
