"""Published models of Llama's shape and near to it."""

from __future__ import annotations

import torch
from published_models import LEFT_OUT, Published, with_head, with_tensors, without_prefix

_ROTARY = "model.layers.{}.self_attn.rotary_emb"
_INVERSE_FREQUENCIES = with_tensors(_ROTARY, ("inv_freq", torch.ones(6)))
_ALL_BUFFERS = with_tensors(
    _ROTARY,
    ("inv_freq", torch.ones(6)),
    ("cos_cached", torch.ones(1, 1, 8, 12)),
    ("sin_cached", torch.ones(1, 1, 8, 12)),
)
_LLAMA = {
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
_LLAMA3_SCALING = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_QWEN = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "max_window_layers": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
}

LLAMAS: dict[str, Published] = {
    "Llama 2": Published("LlamaForCausalLM", "llama", _LLAMA, _INVERSE_FREQUENCIES),
    "Llama 1, heads not grouped": Published(
        "LlamaForCausalLM",
        "llama",
        {**_LLAMA, "num_key_value_heads": LEFT_OUT, "max_position_embeddings": LEFT_OUT, "max_sequence_length": 2048},
        _ALL_BUFFERS,
    ),
    "Llama 3.2": Published(
        "LlamaForCausalLM",
        "llama",
        {
            **_LLAMA,
            "attention_bias": False,
            "eos_token_id": [128001, 128008, 128009],
            "head_dim": 16,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "rope_scaling": _LLAMA3_SCALING,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
    ),
    "DeepSeek Coder": Published(
        "LlamaForCausalLM", "llama", {**_LLAMA, "rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000}
    ),
    "Vicuna, dynamic": Published(
        "LlamaForCausalLM", "llama", {**_LLAMA, "rope_scaling": {"factor": 2.0, "type": "dynamic"}}
    ),
    "Yarn Llama 2": Published(
        "LlamaForCausalLM",
        "llama",
        {
            **_LLAMA,
            "auto_map": {"AutoModelForCausalLM": "modeling_llama_together_yarn.LlamaForCausalLM"},
            "max_position_embeddings": 65536,
            "rope_scaling": {
                "factor": 16.0,
                "finetuned": True,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            },
        },
    ),
    "SmolLM 2, in shards of odd names": Published(
        "LlamaForCausalLM",
        "llama",
        {
            **_LLAMA,
            "is_llama_config": True,
            "rope_interleaved": False,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "transformers.js_config": {"dtype": "q4"},
        },
        with_head("model.embed_tokens.weight"),
        shards=("weights_b.safetensors", "weights_a.safetensors", "extra.safetensors"),
    ),
    "Llama, saved without its head": Published(
        "LlamaForCausalLM", "llama", {**_LLAMA, "tie_word_embeddings": True}, without_prefix("model.")
    ),
    "Llama, no architectures": Published("", "llama", {**_LLAMA, "architectures": None}),
    "Mistral 7B 0.1": Published(
        "MistralForCausalLM",
        "mistral",
        {
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "sliding_window": 20,
            "tie_word_embeddings": False,
        },
    ),
    "Mistral Nemo": Published(
        "MistralForCausalLM",
        "mistral",
        {
            "attention_dropout": 0.0,
            "head_dim": 20,
            "hidden_act": "silu",
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
    ),
    "Mixtral 8x7B": Published(
        "MixtralForCausalLM",
        "mixtral",
        {
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "num_experts_per_tok": 2,
            "num_local_experts": 4,
            "output_router_logits": False,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
    ),
    "Qwen 2.5": Published(
        "Qwen2ForCausalLM", "qwen2", {**_QWEN, "sliding_window": 32768, "tie_word_embeddings": True, "use_mrope": False}
    ),
    "Qwen 2.5, YaRN": Published(
        "Qwen2ForCausalLM",
        "qwen2",
        {
            **_QWEN,
            "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
            "sliding_window": 131072,
            "tie_word_embeddings": False,
        },
    ),
    "Qwen 3": Published(
        "Qwen3ForCausalLM",
        "qwen3",
        {
            **_QWEN,
            "attention_bias": False,
            "head_dim": 16,
            "max_position_embeddings": 40960,
            "rope_scaling": None,
            "sliding_window": None,
            "tie_word_embeddings": True,
        },
        with_head("model.embed_tokens.weight"),
    ),
    "Qwen 3 Embedding": Published(
        "Qwen3ForCausalLM",
        "qwen3",
        {**_QWEN, "head_dim": 16, "sliding_window": None, "tie_word_embeddings": True},
        without_prefix("model."),
    ),
    "Qwen 3 30B A3B": Published(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {
            **_QWEN,
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "head_dim": 16,
            "mlp_only_layers": [],
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "output_router_logits": False,
            "rope_scaling": None,
            "router_aux_loss_coef": 0.001,
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
    ),
}
"""By what they are called."""
