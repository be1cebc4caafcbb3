"""Qwen 3, dense: queries and keys are normed head by head."""

from __future__ import annotations

from executor_svc.models.config import ModelConfig, QkNorm
from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.qwen2 import QWEN2, with_qwen_windows
from executor_svc.models.reading import read_llama_like


def read_qwen3(fields: ConfigFields) -> ModelConfig:
    """Llama's shape with QK-norm, and heads of their own width."""
    config = read_llama_like(fields, "Qwen3ForCausalLM", qk_norm=QkNorm.HEAD, mlp_bias=False)
    return with_qwen_windows(config, fields)


QWEN3 = Family("Qwen3ForCausalLM", read_qwen3, {**QWEN2.defaults, "head_dim": 128})
