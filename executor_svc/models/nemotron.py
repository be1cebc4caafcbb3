"""Nemotron 3 and 4, and Minitron: LayerNorm whose weight is added to 1, a squared ReLU, heads that turn in part."""

from __future__ import annotations

from executor_svc.models.config import ModelConfig, NormKind
from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.naming import Names
from executor_svc.models.reading import read_llama_like
from executor_svc.models.rope_fields import read_rotary


def read_nemotron(fields: ConfigFields) -> ModelConfig:
    """Half of each head turns unless the file says otherwise."""
    num_heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", fields.integer("hidden_size") // max(num_heads, 1))
    rotary = read_rotary(fields, head_dim, default_partial=0.5)
    return read_llama_like(fields, "NemotronForCausalLM", rotary=rotary, norm=NormKind.LAYER_PLUS_ONE, gated=False)


NEMOTRON = Family(
    "NemotronForCausalLM",
    read_nemotron,
    {"hidden_act": "relu2", "norm_eps": 1e-5, "max_position_embeddings": 4096},
    {"rms_norm_eps": "norm_eps"},
    Names(up=("mlp.up_proj",)),
)
