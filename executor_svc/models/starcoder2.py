"""StarCoder 2: LayerNorm and a plain MLP on Llama's attention, biases everywhere, one window."""

from __future__ import annotations

from executor_svc.models.config import ModelConfig, NormKind
from executor_svc.models.config_fields import ConfigFields
from executor_svc.models.family import Family
from executor_svc.models.naming import Names
from executor_svc.models.reading import read_llama_like, read_window, with_windows


def read_starcoder2(fields: ConfigFields) -> ModelConfig:
    """One flag says of all linear layers whether they have biases."""
    config = read_llama_like(fields, "Starcoder2ForCausalLM", norm=NormKind.LAYER, gated=False)
    return with_windows(config, [read_window(fields)] * config.num_layers)


STARCODER2 = Family(
    "Starcoder2ForCausalLM",
    read_starcoder2,
    {
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "max_position_embeddings": 4096,
        "use_bias": True,
        "tie_word_embeddings": True,
    },
    {"rms_norm_eps": "norm_epsilon", "attention_bias": "use_bias", "mlp_bias": "use_bias"},
    Names(up=("mlp.c_fc",), down="mlp.c_proj"),
)
