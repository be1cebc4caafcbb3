"""OLMo 2: norms on what sublayers give, QK-norm over all heads."""

from __future__ import annotations

from typing import Any

from executor_svc.models.config import ModelConfig, Placement, QkNorm
from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.reading import read_llama_like


def read_olmo2(fields: ConfigFields, **changes: Any) -> ModelConfig:
    """Llama's shape but for the norms. `changes`: see read_llama_like."""
    fixed: dict[str, Any] = {"placement": Placement.AFTER, "qk_norm": QkNorm.ALL, "mlp_bias": False}
    return read_llama_like(fields, "Olmo2ForCausalLM", **fixed, **changes)


OLMO2 = Family(
    "Olmo2ForCausalLM",
    read_olmo2,
    {"hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
)
