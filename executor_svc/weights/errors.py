"""What can be wrong with a model on disk.

ModelLoadError
├── UnsupportedModelError   the model is sound, but Octavo cannot run it
└── WeightsError            a file or tensor is missing, surplus, damaged or of the wrong shape
"""

from __future__ import annotations


class ModelLoadError(Exception):
    """A model cannot be loaded. The message names the file and what in it is at fault."""


class UnsupportedModelError(ModelLoadError):
    """The model asks for something that is not implemented. The message says what, and what is."""


class WeightsError(ModelLoadError):
    """The weights are not those that the config describes."""
