"""What a GGUF file's metadata says, in the words of config.json, for every architecture that is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from executor_svc.weights import gguf_names as names
from executor_svc.weights.gguf_metadata import GgufMetadata
from executor_svc.weights.gguf_names import TensorNames
from executor_svc.weights.gguf_rotary import rope_parameters

Fields = dict[str, Any]
_MOST_LAYERS = 1024


@dataclass(frozen=True)
class GgufArchitecture:
    """One value of `general.architecture`."""

    names: TensorNames
    read: Callable[[GgufMetadata], Fields]
    """Gives the fields of config.json. Raises ModelLoadError where a key is missing or wrong, UnsupportedModelError
    where one asks for what no family has."""
    families: tuple[str, ...]
    """What `read` may find it to be, as config.json's `architectures` name it."""


def head_size(metadata: GgufMetadata) -> int:
    """Return the elements of a head."""
    per_head = metadata.count("embedding_length") // metadata.count("attention.head_count")
    head_dim = metadata.count("attention.key_length", max(per_head, 1))
    if metadata.integer("attention.value_length", head_dim) != head_dim:
        raise metadata.refuse(
            f"{metadata.name('attention.value_length')} {metadata.integer('attention.value_length')} other than the "
            f"key length {head_dim} is not supported"
        )
    return head_dim


def _common(metadata: GgufMetadata, architecture: str, model_type: str) -> Fields:
    """Return what all families but GPT-2 and GPT-NeoX share."""
    num_heads = metadata.count("attention.head_count")
    head_dim = head_size(metadata)
    layer = "model.layers.0"
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": _vocab_size(metadata, "model.embed_tokens"),
        "hidden_size": metadata.count("embedding_length"),
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_hidden_layers": metadata.count("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.count("context_length"),
        "attention_bias": f"{layer}.self_attn.q_proj.bias" in metadata.shapes,
        "mlp_bias": f"{layer}.mlp.gate_proj.bias" in metadata.shapes,
        "tie_word_embeddings": "lm_head.weight" not in metadata.shapes,
        "rope_parameters": rope_parameters(metadata, head_dim),
    }


def _vocab_size(metadata: GgufMetadata, embedding: str) -> int:
    shape = metadata.shapes.get(f"{embedding}.weight")
    if shape is None:
        raise metadata.refuse("there is no tensor token_embd.weight")
    return shape[0]


def _llama(metadata: GgufMetadata) -> Fields:
    """Llama, and Mistral and Mixtral, which GGUF does not tell apart."""
    if metadata.integer("expert_count", 0):
        fields = _common(metadata, "MixtralForCausalLM", "mixtral")
        experts = {
            "num_local_experts": metadata.count("expert_count"),
            "num_experts_per_tok": metadata.count("expert_used_count"),
        }
        return fields | experts | {"sliding_window": metadata.integer("attention.sliding_window", 0) or None}
    window = metadata.integer("attention.sliding_window", 0)
    if window:
        return _common(metadata, "MistralForCausalLM", "mistral") | {"sliding_window": window}
    return _common(metadata, "LlamaForCausalLM", "llama")


def _qwen2(metadata: GgufMetadata) -> Fields:
    return _common(metadata, "Qwen2ForCausalLM", "qwen2") | {"use_sliding_window": False}


def _qwen3(metadata: GgufMetadata) -> Fields:
    return _common(metadata, "Qwen3ForCausalLM", "qwen3") | {"use_sliding_window": False}


def _qwen3_moe(metadata: GgufMetadata) -> Fields:
    return _common(metadata, "Qwen3MoeForCausalLM", "qwen3_moe") | {
        "use_sliding_window": False,
        "num_experts": metadata.count("expert_count"),
        "num_local_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        # GGUF has no key for it: whoever reads this architecture gives the chosen experts shares of 1 in all.
        "norm_topk_prob": metadata.flag("expert_weights_norm", True),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma(metadata: GgufMetadata) -> Fields:
    gelu = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    return _common(metadata, "GemmaForCausalLM", "gemma") | gelu


def _gemma2(metadata: GgufMetadata) -> Fields:
    return _common(metadata, "Gemma2ForCausalLM", "gemma2") | {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _gemma_query_scalar(metadata, 46),
        # Files of the model's first weeks lack the three; they are the same in every published size.
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
        "sliding_window": metadata.count("attention.sliding_window", 4096),
    }


def _gemma3(metadata: GgufMetadata) -> Fields:
    fields = _common(metadata, "Gemma3ForCausalLM", "gemma3_text")
    rope = rope_parameters(metadata, head_size(metadata), default_theta=1_000_000.0)
    del fields["rope_parameters"]
    window = metadata.integer("attention.sliding_window", 0)
    local = metadata.number("rope.freq_base_swa", 10000.0)
    final = metadata.number("final_logit_softcapping", 0.0) or None
    return fields | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _gemma_query_scalar(metadata, 62),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": final,
        "sliding_window": window or fields["max_position_embeddings"],
        "layer_types": _layer_types(metadata, 6 if window else 1),
        # The base and scaling of the layers without a window, the base of those with one.
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "rope_local_base_freq": local,
    }


def _gemma_query_scalar(metadata: GgufMetadata, layers_of_27b: int) -> int:
    """Return what queries are divided by the root of. GGUF has no key: the largest size alone has another."""
    if metadata.count("block_count") == layers_of_27b:
        return metadata.count("embedding_length") // metadata.count("attention.head_count")
    return head_size(metadata)


def _num_layers(metadata: GgufMetadata) -> int:
    """Return how many layers there are to describe one by one."""
    count = metadata.count("block_count")
    if count > _MOST_LAYERS:
        raise metadata.refuse(f"{metadata.name('block_count')} is {count}: more than {_MOST_LAYERS} are not supported")
    return count


def _layer_types(metadata: GgufMetadata, period: int) -> list[str]:
    """Return which layers have a window: those the file lists, or all but the last of every `period`."""
    key = "attention.sliding_window_pattern"
    layers = range(_num_layers(metadata))
    listed = metadata.values(key)
    if listed is not None:
        if len(listed) < len(layers):
            raise metadata.refuse(f"{metadata.name(key)} has {len(listed)} layers of {len(layers)}")
        windowed = [bool(listed[layer]) for layer in layers]
    else:
        period = metadata.count(key, period)
        windowed = [(layer + 1) % period != 0 for layer in layers]
    return ["sliding_attention" if each else "full_attention" for each in windowed]


def _phi3(metadata: GgufMetadata) -> Fields:
    fields = _common(metadata, "Phi3ForCausalLM", "phi3")
    rope = fields["rope_parameters"]
    original = rope.get("original_max_position_embeddings", metadata.integer("rope.scaling.original_context_length", 0))
    return fields | {
        "original_max_position_embeddings": original or fields["max_position_embeddings"],
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
        "sliding_window": metadata.integer("attention.sliding_window", 0) or None,
    }


def _olmo2(metadata: GgufMetadata) -> Fields:
    """OLMo 2, and OLMo 3, which GGUF tells apart by its window."""
    window = metadata.integer("attention.sliding_window", 0)
    if window:
        fields = _common(metadata, "Olmo3ForCausalLM", "olmo3")
        rope = fields["rope_parameters"]
        # Scaling is for the layers without a window alone.
        unscaled = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        return fields | {
            "sliding_window": window,
            "layer_types": _layer_types(metadata, 4),
            "rope_parameters": {"full_attention": rope, "sliding_attention": unscaled},
        }
    return _common(metadata, "Olmo2ForCausalLM", "olmo2")


def _granite(metadata: GgufMetadata) -> Fields:
    return _common(metadata, "GraniteForCausalLM", "granite") | {
        "attention_multiplier": metadata.number("attention.scale", head_size(metadata) ** -0.5),
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
    }


def _smollm3(metadata: GgufMetadata) -> Fields:
    """GGUF has no key for the layers without positions: they are every fourth."""
    layers = range(1, _num_layers(metadata) + 1)
    return _common(metadata, "SmolLM3ForCausalLM", "smollm3") | {
        "no_rope_layers": [int(layer % 4 != 0) for layer in layers],
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
    }


def _gpt2(metadata: GgufMetadata) -> Fields:
    hidden_size = metadata.count("embedding_length")
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": _vocab_size(metadata, "transformer.wte"),
        "n_embd": hidden_size,
        "n_inner": metadata.count("feed_forward_length", 4 * hidden_size),
        "n_layer": metadata.count("block_count"),
        "n_head": metadata.count("attention.head_count"),
        "n_positions": metadata.count("context_length"),
        "n_ctx": metadata.count("context_length"),
        "layer_norm_epsilon": metadata.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        "tie_word_embeddings": "lm_head.weight" not in metadata.shapes,
    }


def _gpt_neox(metadata: GgufMetadata) -> Fields:
    rope = rope_parameters(metadata, head_size(metadata))
    partial = rope.get("partial_rotary_factor", 1.0)
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": _vocab_size(metadata, "gpt_neox.embed_in"),
        "hidden_size": metadata.count("embedding_length"),
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_hidden_layers": metadata.count("block_count"),
        "num_attention_heads": metadata.count("attention.head_count"),
        "hidden_act": "gelu",
        "layer_norm_eps": metadata.number("attention.layer_norm_epsilon"),
        "max_position_embeddings": metadata.count("context_length"),
        "use_parallel_residual": metadata.flag("use_parallel_residual", True),
        "attention_bias": "gpt_neox.layers.0.attention.query_key_value.bias" in metadata.shapes,
        "rotary_pct": partial,
        "rotary_emb_base": rope["rope_theta"],
        "rope_parameters": rope | {"partial_rotary_factor": partial},
        "tie_word_embeddings": "embed_out.weight" not in metadata.shapes,
    }


ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture(names.LLAMA, _llama, ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM")),
    "qwen2": GgufArchitecture(names.QWEN2, _qwen2, ("Qwen2ForCausalLM",)),
    "qwen3": GgufArchitecture(names.QWEN3, _qwen3, ("Qwen3ForCausalLM",)),
    "qwen3moe": GgufArchitecture(names.QWEN3, _qwen3_moe, ("Qwen3MoeForCausalLM",)),
    "gemma": GgufArchitecture(names.GEMMA, _gemma, ("GemmaForCausalLM",)),
    "gemma2": GgufArchitecture(names.GEMMA2, _gemma2, ("Gemma2ForCausalLM",)),
    "gemma3": GgufArchitecture(names.GEMMA2, _gemma3, ("Gemma3ForCausalLM",)),
    "phi3": GgufArchitecture(names.PHI3, _phi3, ("Phi3ForCausalLM",)),
    "olmo2": GgufArchitecture(names.OLMO2, _olmo2, ("Olmo2ForCausalLM", "Olmo3ForCausalLM")),
    "granite": GgufArchitecture(names.LLAMA, _granite, ("GraniteForCausalLM",)),
    "smollm3": GgufArchitecture(names.LLAMA, _smollm3, ("SmolLM3ForCausalLM",)),
    "gpt2": GgufArchitecture(names.GPT2, _gpt2, ("GPT2LMHeadModel",)),
    "gptneox": GgufArchitecture(names.GPT_NEOX, _gpt_neox, ("GPTNeoXForCausalLM",)),
}
"""By GGUF's name. Its "llama" covers Mistral and Mixtral too."""
