"""Model families and their loading."""

from __future__ import annotations

from executor_svc.models.config import ModelConfig, ServedConfig
from executor_svc.models.decoder import CausalLM
from executor_svc.models.loader import LoadedModel, describe, is_family, load_model, load_weights, read_config
from executor_svc.models.sharding import shard_config
from executor_svc.weights.errors import ModelLoadError, UnsupportedModelError, WeightsError

__all__ = [
    "CausalLM",
    "LoadedModel",
    "ModelConfig",
    "ModelLoadError",
    "ServedConfig",
    "UnsupportedModelError",
    "WeightsError",
    "describe",
    "is_family",
    "load_model",
    "load_weights",
    "read_config",
    "shard_config",
]
