"""Tiny random models of every family, saved by transformers: what the model tests run and docs/models.md lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

WINDOW = 20
"""Tokens of the sliding windows: the tests' sequences are longer."""
SIZES = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
"""Of most families; those of the others are given whole."""
NEOX_SIZES = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"} | {"hidden_size": 64}
GPT2_SIZES = {"vocab_size": 320, "n_positions": 128, "n_embd": 48, "n_layer": 2, "n_head": 4}
OPT_SIZES = {**NEOX_SIZES, "ffn_dim": 80}
del OPT_SIZES["intermediate_size"]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
FULL, SLIDING = "full_attention", "sliding_attention"
PROOFS = {
    "whole": "test_logits",
    "chunked": "test_logits",
    "step by step": "test_logits",
    "prefix-cached": "test_logits",
    "past the window": "test_logits",
    "greedy in batches": "test_greedy_tokens_in_batches",
    "names": "test_names",
}
"""What is proven of each variation, and the test in test_model_families.py that does; logits against transformers."""


@dataclass(frozen=True, eq=False)
class Variation:
    """One model: transformers' config class by name, and what it is given beside the sizes."""

    family: str
    name: str
    config: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=lambda: SIZES)
    max_model_len: int | None = None
    """Given to the loader."""
    shortest: int = 1
    """Tokens of the shortest prompt that it is to be compared on."""

    @property
    def is_windowed(self) -> bool:
        """Whether a layer of it has a window."""
        return bool(self.fields.get("sliding_window") or self.fields.get("window_size"))

    @property
    def id(self) -> str:
        """For test ids and folders."""
        return f"{self.family}, {self.name}"


def _longrope(length: int) -> dict[str, Any]:
    pairs = 6
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + 0.1 * index for index in range(pairs)],
        "long_factor": [1.5 + 0.5 * index for index in range(pairs)],
    }
    return {"rope_parameters": parameters, "original_max_position_embeddings": length}


_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24}
_QWEN3 = {"head_dim": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, **_QWEN3}
_LAYERS4 = {"num_hidden_layers": 4}
_WINDOWED = {"sliding_window": WINDOW}
_SCALES = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22}
_SCALES |= {"attention_multiplier": 0.11, "logits_scaling": 6.0}
_GRANITE4 = {"layer_types": [FULL] * 2, "num_local_experts": 0, "shared_intermediate_size": 80, "mamba_n_heads": 4}
_NEO_SIZES = {"vocab_size": 320, "hidden_size": 48, "num_layers": 4, "num_heads": 4, "max_position_embeddings": 128}
_NEO = {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
VARIATIONS = (
    Variation("Llama", "plain", "LlamaConfig"),
    Variation("Llama", "biases", "LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    Variation("Llama", "tied head, wide heads", "LlamaConfig", {"tie_word_embeddings": True, "head_dim": 20}),
    Variation("Llama", "GELU", "LlamaConfig", {"hidden_act": "gelu"}),
    Variation("Llama", "llama3 rotary", "LlamaConfig", {"rope_parameters": LLAMA3}),
    Variation("Llama", "YaRN", "LlamaConfig", {"rope_parameters": YARN}),
    Variation("Mistral", "no window", "MistralConfig", {"sliding_window": None}),
    Variation("Mistral", "window", "MistralConfig", {"sliding_window": WINDOW}),
    Variation("Mixtral", "no window", "MixtralConfig", {"num_local_experts": 4}),
    Variation("Mixtral", "window", "MixtralConfig", {"num_local_experts": 4, "sliding_window": WINDOW}),
    Variation("Qwen 2", "plain", "Qwen2Config"),
    Variation(
        "Qwen 2",
        "window on the later layers",
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    Variation("Qwen 3", "plain", "Qwen3Config", _QWEN3),
    Variation("Qwen 3", "biases, tied head", "Qwen3Config", {"attention_bias": True, "tie_word_embeddings": True}),
    Variation(
        "Qwen 3",
        "window on all layers",
        "Qwen3Config",
        {**_QWEN3, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0},
    ),
    Variation("Qwen 3 MoE", "plain", "Qwen3MoeConfig", _EXPERTS),
    Variation("Qwen 3 MoE", "weights sum to 1", "Qwen3MoeConfig", {**_EXPERTS, "norm_topk_prob": True}),
    Variation(
        "Qwen 3 MoE",
        "dense layers between",
        "Qwen3MoeConfig",
        {**_EXPERTS, **_LAYERS4, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    ),
    Variation("Gemma 1", "plain", "GemmaConfig", {"head_dim": 16}),
    Variation("Gemma 1", "untied, biases", "GemmaConfig", {"tie_word_embeddings": False, "attention_bias": True}),
    Variation("Gemma 2", "window on every other layer", "Gemma2Config", {**_GEMMA, "sliding_window": WINDOW}),
    Variation(
        "Gemma 2",
        "no soft caps",
        "Gemma2Config",
        {**_GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    Variation(
        "Gemma 2",
        "tight soft caps, window on all layers",
        "Gemma2Config",
        {
            **_GEMMA,
            "sliding_window": WINDOW,
            "layer_types": [SLIDING, SLIDING],
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
        },
    ),
    Variation(
        "Gemma 3",
        "window on five of six layers",
        "Gemma3TextConfig",
        {**_GEMMA, "sliding_window": WINDOW, "num_hidden_layers": 6},
    ),
    Variation(
        "Gemma 3",
        "scaled rotary, soft cap of the logits",
        "Gemma3TextConfig",
        {
            **_GEMMA,
            "sliding_window": WINDOW,
            "layer_types": [SLIDING, FULL],
            "final_logit_softcapping": 2.0,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    Variation("Gemma 3", "text part of one that sees", "Gemma3Config", {"sliding_window": WINDOW, **_GEMMA}),
    Variation("Phi-3", "plain", "Phi3Config"),
    Variation(
        "Phi-3",
        "window, heads that turn in part",
        "Phi3Config",
        {
            "sliding_window": WINDOW,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    Variation("Phi-3", "LongRoPE, short factors", "Phi3Config", _longrope(100)),
    Variation("Phi-3", "LongRoPE, long factors", "Phi3Config", _longrope(20), max_model_len=128, shortest=24),
    Variation("OLMo 2", "plain", "Olmo2Config"),
    Variation("OLMo 2", "biases, tied head", "Olmo2Config", {"attention_bias": True, "tie_word_embeddings": True}),
    Variation("Granite", "scales", "GraniteConfig", _SCALES),
    Variation("Granite", "biases, tied head", "GraniteConfig", {"attention_bias": True, "tie_word_embeddings": True}),
    Variation("SmolLM 3", "every fourth layer does not turn", "SmolLM3Config", _LAYERS4),
    Variation(
        "SmolLM 3",
        "window on those that do not",
        "SmolLM3Config",
        {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": WINDOW},
    ),
    Variation("GPT-2", "plain", "GPT2Config", sizes=GPT2_SIZES),
    Variation(
        "GPT-2",
        "scores scaled by layer, untied, ReLU, own inner size",
        "GPT2Config",
        {
            "scale_attn_by_inverse_layer_idx": True,
            "tie_word_embeddings": False,
            "activation_function": "relu",
            "n_inner": 72,
        },
        GPT2_SIZES,
    ),
    Variation("GPT-2", "scores not scaled", "GPT2Config", {"scale_attn_weights": False}, GPT2_SIZES),
    Variation("OPT", "plain", "OPTConfig", sizes=OPT_SIZES),
    Variation(
        "OPT",
        "narrow embedding, norms after the sums (350m)",
        "OPTConfig",
        {"word_embed_proj_dim": 32, "do_layer_norm_before": False},
        OPT_SIZES,
    ),
    Variation(
        "OPT",
        "no biases, norms without weights (Galactica)",
        "OPTConfig",
        {"enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"},
        OPT_SIZES,
    ),
    Variation("GPT-NeoX", "parallel", "GPTNeoXConfig", sizes=NEOX_SIZES),
    Variation(
        "GPT-NeoX",
        "one after the other, no attention bias, whole heads turn",
        "GPTNeoXConfig",
        {
            "use_parallel_residual": False,
            "attention_bias": False,
            "hidden_act": "gelu_fast",
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
        NEOX_SIZES,
    ),
)


FIRSTS = tuple({variation.family: variation for variation in reversed(VARIATIONS)}.values())[::-1]
"""The first variation of each family."""
RARER = (
    Variation(
        "OLMo 3",
        "window on three of four layers, YaRN on the fourth",
        "Olmo3Config",
        {
            **_LAYERS4,
            "sliding_window": WINDOW,
            "rope_parameters": {FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 1e4}},
        },
    ),
    Variation(
        "Ministral",
        "window on one of two layers",
        "MinistralConfig",
        {**_WINDOWED, "layer_types": [SLIDING, FULL], "head_dim": 20},
    ),
    Variation("GPT-Neo", "window on every other layer", "GPTNeoConfig", _NEO, _NEO_SIZES),
    Variation("Granite 4", "dense, heads that do not turn", "GraniteMoeHybridConfig", {**_GRANITE4, **_SCALES}),
    Variation("Command R", "plain", "CohereConfig"),
    Variation("Command R7B", "every fourth layer does not turn", "Cohere2Config", {**_LAYERS4, **_WINDOWED}),
    Variation("EXAONE 4", "every fourth layer does not turn", "Exaone4Config", {**_LAYERS4, **_WINDOWED}),
    Variation("GLM-4", "heads that turn in part", "GlmConfig", {"head_dim": 16}),
    Variation("GLM-4-0414", "norms around sublayers", "Glm4Config", {"head_dim": 16}),
    Variation("Nemotron", "heads that turn in part, squared ReLU", "NemotronConfig"),
    Variation("StableLM", "one after the other", "StableLmConfig", sizes={**SIZES, "hidden_size": 64}),
    Variation(
        "StableLM",
        "side by side, biases",
        "StableLmConfig",
        {"use_parallel_residual": True, "use_qkv_bias": True},
        {**SIZES, "hidden_size": 64},
    ),
    Variation("StarCoder 2", "window", "Starcoder2Config", _WINDOWED),
    Variation("Mistral 3", "text part of one that sees", "Mistral3Config", {"head_dim": 20, "sliding_window": None}),
    Variation("Qwen 2.5 VL", "text part of one that sees", "Qwen2_5_VLConfig", {"rope_parameters": _MROPE}),
)
"""Of families that are less in use: under `make test` they run through the tests of `PROOFS` alone."""


def save_variation(folder: Path, variation: Variation, *, seed: int = 0) -> Any:
    """Write a model with random weights into `folder`, as transformers saves it, and return it in float32."""
    config_class = getattr(transformers, variation.config)
    fields = {**variation.sizes, **variation.fields}
    if variation.config in SEEING:
        model = _seeing(config_class, variation.config, fields)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config_class(**fields), dtype=torch.float32)
    randomize(model, seed)
    model.eval().save_pretrained(folder)
    return model


_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 28,
    "patch_size": 14,
}
SEEING: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "Gemma3Config": (
        {"vision_config": {**_VISION, "model_type": "siglip_vision_model"}, "mm_tokens_per_image": 4},
        {},
    ),
    "Mistral3Config": (
        {"vision_config": {**_VISION, "model_type": "pixtral"}, "tie_word_embeddings": False},
        {"model_type": "mistral"},
    ),
    "Qwen2_5_VLConfig": (
        {
            "vision_config": {
                "depth": 1,
                "hidden_size": 32,
                "num_heads": 2,
                "out_hidden_size": 48,
                "intermediate_size": 16,
            }
        },
        {},
    ),
}
"""Config classes of models that see: what they are given, and what their text part is beside a variation's own."""


def _seeing(config_class: Any, name: str, fields: Mapping[str, Any]) -> Any:
    """Make a model that sees."""
    own, of_text = SEEING[name]
    config = config_class(text_config={**of_text, **fields}, **own)
    return getattr(transformers, f"{name.removesuffix('Config')}ForConditionalGeneration")(config).float()


FALLBACKS: Mapping[str, Mapping[str, Any]] = {
    "PhiConfig": {},
    "SeedOssConfig": {"head_dim": 16},
    "FlexOlmoConfig": {"num_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    "OlmoeConfig": {"num_experts": 4, "num_experts_per_tok": 2},
    "GPTJConfig": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 128},
    "GPTBigCodeConfig": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 80},
    "DeepseekV3Config": {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
}
"""Models of no family, which transformers' own code runs: config classes, and what they are given beside the sizes."""
_OF_FAMILIES: Mapping[str, Mapping[str, Any]] = {"Cohere2Config": {**_WINDOWED, **_LAYERS4}}
"""The same of models of families, which tests run by that code nevertheless."""


def save_fallback(folder: Path, config: str, **fields: Any) -> Any:
    """Write a model of no family with random weights, as transformers saves it, and return it in float32."""
    config_class = getattr(transformers, config)
    own = {**FALLBACKS.get(config, {}), **_OF_FAMILIES.get(config, {}), **fields}
    sizes = {"vocab_size": 320, "pad_token_id": 0} if "n_embd" in own else SIZES
    model = transformers.AutoModelForCausalLM.from_config(config_class(**{**sizes, **own}), dtype=torch.float32)
    randomize(model, 0)
    model.eval().save_pretrained(folder)
    return model


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Draw every weight anew, at scales that make each of them matter to the output."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 1:
                # Around 1 for a norm's weight, around 0 for Gemma's and for a bias, which must not drown the tokens.
                spread = 0.1 if name.endswith("bias") else 0.3
                weight.copy_(spread * noise + (1.0 if float(weight.mean()) == 1.0 else 0.0))
            elif "embed" in name or "wte" in name or "wpe" in name:
                weight.copy_(0.1 * noise)
            else:
                # The input features are the last dimension, but for GPT-2's, where sides are nearly alike.
                weight.copy_(1.5 / weight.shape[-1] ** 0.5 * noise)
