"""What a model family says of itself: how its config.json maps to a ModelConfig, and how its tensors are named."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from executor_svc.models.config import ModelConfig
from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.naming import Names, as_found, name_decoder
from executor_svc.models.spec import DecoderSpec
from executor_svc.weights import ModelLoadError

LLAMA_NAMES = Names()


@dataclass(frozen=True)
class Family:
    """One architecture."""

    architecture: str
    """Its name in config.json's `architectures`."""
    read_fields: Callable[[ConfigFields], ModelConfig]
    """Raises ModelLoadError where a field is missing, UnsupportedModelError where one asks for what is not there, and
    ValueError where the numbers make no decoder.
    """
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What fields mean that config.json leaves out: those of transformers' class."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """What config.json calls fields whose names here are Llama's."""
    names: Names | Callable[[Collection[str]], Names] = LLAMA_NAMES
    """Names of the tensors; a function of those that a checkpoint has where a family was saved under several."""
    unless: tuple[str, ...] = ()
    """Fields that ask for what Octavo's decoder has not: where one is set the model runs by transformers' code."""

    def takes(self, fields: ConfigFields) -> bool:
        """Whether none of those is set."""
        return not any(fields.get(name) for name in self.unless)

    def read_config(self, fields: ConfigFields) -> ModelConfig:
        """Map config.json. Raises ModelLoadError, and UnsupportedModelError, with the name of the field."""
        try:
            return self.read_fields(fields.within(self.defaults, self.aliases))
        except ValueError as error:
            raise ModelLoadError(f"{fields.path}: {error}") from None

    def name_tensors(self, config: ModelConfig, found: Collection[str]) -> DecoderSpec:
        """Name and measure the tensors of a model. `found`: the checkpoint's own names."""
        names = self.names if isinstance(self.names, Names) else self.names(found)
        return name_decoder(config, found, as_found(names, found))
