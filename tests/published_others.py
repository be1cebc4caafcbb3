"""Published models of the other families."""

from __future__ import annotations

import torch
from published_models import LEFT_OUT, SIZES, Published, both, with_head, with_tensors, without_prefix

GPT2_SIZES = {"vocab_size": 320, "n_positions": 128, "n_ctx": 128, "n_embd": 48, "n_layer": 2, "n_head": 4}
GPT2_SIZES |= {"bos_token_id": 2, "eos_token_id": 2}
OPT_SIZES = {name: size for name, size in SIZES.items() if name not in ("num_key_value_heads", "intermediate_size")}
OPT_SIZES |= {"ffn_dim": 80, "max_position_embeddings": 128, "prefix": "</s>", "dropout": 0.1, "pad_token_id": 1}
NEOX_SIZES = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"} | {"hidden_size": 64}
NEOX_SIZES |= {"max_position_embeddings": 128, "layer_norm_eps": 1e-5, "classifier_dropout": 0.1}
_MASK = torch.ones(1, 1, 128, 128).tril()
_NEOX_BUFFERS = with_tensors(
    "gpt_neox.layers.{}.attention",
    ("bias", _MASK.bool()),
    ("masked_bias", torch.tensor(-1e9)),
    ("rotary_emb.inv_freq", torch.ones(2)),
)
_LONG, _SHORT = [1.25 + 0.75 * pair for pair in range(6)], [1.0 + 0.05 * pair for pair in range(6)]
_PHI3 = {
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "attention_bias": False,
    "embd_pdrop": 0.0,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_PHI3_LONG = {**_PHI3, "max_position_embeddings": 131072, "sliding_window": 262144}
_GEMMA = {
    "attention_bias": False,
    "head_dim": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
_GEMMA2 = {
    **_GEMMA,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 16,
    "sliding_window": 20,
}
_GEMMA3 = {
    **_GEMMA,
    "hidden_act": LEFT_OUT,
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "max_position_embeddings": 32768,
    "num_hidden_layers": 6,
    "query_pre_attn_scalar": 16,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 20,
    "sliding_window_pattern": 6,
}
_GEMMA3_TEXT = {
    "head_dim": 16,
    "hidden_size": 48,
    "intermediate_size": 80,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "query_pre_attn_scalar": 16,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 20,
    "vocab_size": 320,
}
_SIGLIP = {
    "hidden_size": 16,
    "image_size": 28,
    "intermediate_size": 16,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "patch_size": 14,
    "vision_use_head": False,
}
_GPT2 = {
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-5,
    "summary_type": "cls_index",
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "torch_dtype": LEFT_OUT,
    "use_cache": LEFT_OUT,
}
_NEOX = {
    "hidden_act": "gelu",
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_parallel_residual": True,
}
_OPT = {"_remove_final_layer_norm": False, "activation_function": "relu", "do_layer_norm_before": True}

OTHERS: dict[str, Published] = {
    "Gemma 2B": Published("GemmaForCausalLM", "gemma", {**_GEMMA, "hidden_act": "gelu", "hidden_activation": LEFT_OUT}),
    "Gemma 1.1": Published("GemmaForCausalLM", "gemma", _GEMMA, with_head("model.embed_tokens.weight")),
    "Gemma 2 2B": Published("Gemma2ForCausalLM", "gemma2", _GEMMA2),
    "Gemma 3 1B": Published("Gemma3ForCausalLM", "gemma3_text", _GEMMA3),
    "Gemma 3 4B": Published(
        "Gemma3ForConditionalGeneration",
        "gemma3",
        {
            "boi_token_index": 255999,
            "eoi_token_index": 256000,
            "eos_token_id": [1, 106],
            "image_token_index": 262144,
            "mm_tokens_per_image": 4,
            "text_config": _GEMMA3_TEXT,
            "vision_config": _SIGLIP,
        },
        sizes={},
    ),
    "Phi-3 mini 4k": Published("Phi3ForCausalLM", "phi3", {**_PHI3, "rope_scaling": None, "sliding_window": 20}),
    "Phi-3 mini 128k": Published(
        "Phi3ForCausalLM",
        "phi3",
        {**_PHI3_LONG, "rope_scaling": {"long_factor": _LONG, "short_factor": _SHORT, "type": "longrope"}},
    ),
    "Phi-3 mini 128k, its first file": Published(
        "Phi3ForCausalLM",
        "phi3",
        {**_PHI3_LONG, "rope_scaling": {"long_factor": _LONG, "short_factor": _SHORT, "type": "su"}},
        for_transformers={"rope_scaling": {"long_factor": _LONG, "short_factor": _SHORT, "type": "longrope"}},
    ),
    "Phi-4 mini": Published(
        "Phi3ForCausalLM",
        "phi3",
        {
            **_PHI3_LONG,
            "hidden_size": 64,
            "interpolate_factor": 1,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"long_factor": _LONG, "short_factor": _SHORT, "type": "longrope"},
            "tie_word_embeddings": True,
        },
    ),
    "Phi-4": Published(
        "Phi3ForCausalLM",
        "phi3",
        {
            **_PHI3,
            "max_position_embeddings": 16384,
            "original_max_position_embeddings": 16384,
            "rope_scaling": None,
            "rope_theta": 250000,
            "sliding_window": None,
        },
    ),
    "OLMo 2": Published(
        "Olmo2ForCausalLM",
        "olmo2",
        {
            "attention_bias": False,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "pad_token_id": 0,
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": 500000,
            "tie_word_embeddings": False,
        },
    ),
    "OLMo 3": Published(
        "Olmo3ForCausalLM",
        "olmo3",
        {
            "attention_bias": False,
            "hidden_act": "silu",
            "layer_types": [*["sliding_attention"] * 3, "full_attention"],
            "max_position_embeddings": 65536,
            "num_hidden_layers": 4,
            "pad_token_id": 0,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "yarn",
            },
            "rope_theta": 500000,
            "sliding_window": 20,
            "tie_word_embeddings": False,
        },
    ),
    "EXAONE 3.5": Published(
        "ExaoneForCausalLM",
        "exaone",
        {
            "activation_function": "silu",
            "attention_dropout": 0.0,
            "auto_map": {"AutoModelForCausalLM": "modeling_exaone.ExaoneForCausalLM"},
            "embed_dropout": 0.0,
            "head_dim": 16,
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 32768,
            "num_hidden_layers": LEFT_OUT,
            "num_layers": 2,
            "rope_scaling": {
                "factor": 8.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 1000000.0,
            "tie_word_embeddings": True,
        },
    ),
    "Command R7B": Published(
        "Cohere2ForCausalLM",
        "cohere2",
        {
            "attention_bias": False,
            "head_dim": 12,
            "hidden_act": "silu",
            "layer_norm_eps": 1e-5,
            "layer_switch": 4,
            "logit_scale": 0.25,
            "max_position_embeddings": 132096,
            "num_hidden_layers": 4,
            "order_of_interleaved_layers": "local_attn_first",
            "pad_token_id": 0,
            "position_embedding_type": "rope_gptj",
            "rope_scaling": None,
            "rope_theta": 50000,
            "rotary_pct": 1.0,
            "sliding_window": 20,
            "sliding_window_pattern": 4,
            "use_embedding_sharing": True,
            "use_gated_activation": True,
            "use_parallel_block": True,
            "use_parallel_embedding": True,
        },
    ),
    "Granite 3.1": Published(
        "GraniteForCausalLM",
        "granite",
        {
            "attention_bias": False,
            "attention_multiplier": 0.015625,
            "embedding_multiplier": 12.0,
            "hidden_act": "silu",
            "logits_scaling": 8.0,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "residual_multiplier": 0.22,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 5000000.0,
            "tie_word_embeddings": True,
        },
    ),
    "SmolLM 3": Published(
        "SmolLM3ForCausalLM",
        "smollm3",
        {
            "attention_bias": False,
            "hidden_act": "silu",
            "layer_types": ["full_attention"] * 4,
            "max_position_embeddings": 65536,
            "max_window_layers": 28,
            "mlp_bias": False,
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0],
            "num_hidden_layers": 4,
            "pad_token_id": 0,
            "pretraining_tp": 2,
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": 5000000.0,
            "sliding_window": None,
            "tie_word_embeddings": LEFT_OUT,
            "use_sliding_window": False,
        },
    ),
    "GPT-2": Published(
        "GPT2LMHeadModel",
        "gpt2",
        _GPT2,
        both(without_prefix("transformer."), with_tensors("h.{}.attn", ("bias", _MASK))),
        GPT2_SIZES,
    ),
    "DialoGPT": Published(
        "GPT2LMHeadModel",
        "gpt2",
        {**_GPT2, "n_inner": None},
        both(
            with_head("transformer.wte.weight"),
            with_tensors("transformer.h.{}.attn", ("bias", _MASK.byte()), ("masked_bias", torch.tensor(-1e4))),
        ),
        GPT2_SIZES,
    ),
    "Cerebras GPT": Published(
        "GPT2LMHeadModel",
        "gpt2",
        {**_GPT2, "activation_function": "gelu", "n_inner": 80, "scale_attn_weights": True},
        sizes=GPT2_SIZES,
    ),
    "OPT 125m": Published(
        "OPTForCausalLM",
        "opt",
        {**_OPT, "word_embed_proj_dim": 48},
        with_head("model.decoder.embed_tokens.weight"),
        OPT_SIZES,
    ),
    "OPT 350m": Published(
        "OPTForCausalLM",
        "opt",
        {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 32},
        without_prefix("model.", ("decoder.version", torch.tensor(3))),
        OPT_SIZES,
    ),
    "Galactica": Published(
        "OPTForCausalLM",
        "opt",
        {
            **_OPT,
            "activation_function": "gelu",
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "word_embed_proj_dim": 48,
        },
        sizes=OPT_SIZES,
    ),
    "Pythia": Published("GPTNeoXForCausalLM", "gpt_neox", _NEOX, _NEOX_BUFFERS, NEOX_SIZES),
    "RedPajama INCITE": Published(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        {**_NEOX, "rotary_pct": 1.0, "use_parallel_residual": False},
        _NEOX_BUFFERS,
        NEOX_SIZES,
    ),
    "GPT-NeoX 20B": Published(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        {**_NEOX, "attention_probs_dropout_prob": 0, "hidden_act": "gelu_fast", "hidden_dropout_prob": 0},
        _NEOX_BUFFERS,
        NEOX_SIZES,
    ),
}
"""By what they are called."""
