"""Gemma 1."""

from __future__ import annotations

from executor_svc.models.config import Activation, ModelConfig, NormKind
from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.reading import read_activation, read_llama_like


def read_gemma(fields: ConfigFields) -> ModelConfig:
    """Norms add their weight to 1, embeddings are scaled. An activation called "gelu" is the approximation by tanh."""
    fields.refuse_set("use_bidirectional_attention")
    activation = read_activation(fields)
    return read_llama_like(
        fields,
        "GemmaForCausalLM",
        norm=NormKind.RMS_PLUS_ONE,
        activation=Activation.GELU_TANH if activation is Activation.GELU else activation,
        mlp_bias=False,
        embedding_scale=fields.integer("hidden_size") ** 0.5,
    )


GEMMA = Family(
    "GemmaForCausalLM",
    read_gemma,
    {
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
)
