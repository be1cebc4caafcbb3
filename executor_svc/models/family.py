"""What a model family says of itself: how its config.json maps to a ModelConfig, and how its tensors are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from executor_svc.models.config import ModelConfig
from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.spec import DecoderSpec


@dataclass(frozen=True)
class Family:
    """One architecture."""

    architecture: str
    """Its name in config.json's `architectures`."""
    read_config: Callable[[ConfigFields], ModelConfig]
    """Raises ModelLoadError where a field is missing, UnsupportedModelError where one asks for what is not there."""
    name_tensors: Callable[[ModelConfig], DecoderSpec]
