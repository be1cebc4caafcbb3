"""The one error of this package."""

from __future__ import annotations


class ModelError(Exception):
    """A model cannot be found, fetched, prepared or opened. The message says what to do, naming the command to run."""
