"""Tiny random models of every architecture that GGUF names, made by transformers, and GGUF files of the same weights.

The files are written as llama.cpp's converter writes them: its keys of metadata, its changes of tensors, and the names
that the `gguf` package's own map gives.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from factories import BOS_TOKEN_ID, EOS_TOKEN_ID, PAD_TOKEN_ID, make_tokenizer
from gguf_models import add, add_tensor, add_tokenizer, interleaved
from safetensors.torch import load_file
from torch import Tensor

VOCAB_SIZE = 320
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": PAD_TOKEN_ID,
}
_GPT2_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
}
_LONG, _SHORT = [1.5 + 0.25 * pair for pair in range(8)], [1.0 + 0.125 * pair for pair in range(8)]


@dataclass(frozen=True)
class GgufFamily:
    """One model: what transformers calls it, what GGUF does, and how its config differs from the tiny one's."""

    model: str
    architecture: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    interleaved: bool = False
    plus_one: bool = False

    def make(self, folder: Path, seed: int = 0) -> Path:
        """Write the model and its tokenizer into `folder` as transformers saves it, and return it."""
        config_class = getattr(transformers, self.model).config_class
        shape = _GPT2_SHAPE if self.architecture == "gpt2" else _SHAPE
        if self.architecture == "gptneox":
            shape = {key: value for key, value in shape.items() if key != "num_key_value_heads"}
        torch.manual_seed(seed)
        model = getattr(transformers, self.model)(config_class(**{**shape, **self.changes}))
        with torch.no_grad():
            for parameter in model.parameters():
                _randomize(parameter)
        model.save_pretrained(folder)
        make_tokenizer(folder)
        return folder

    def write(
        self,
        folder: Path,
        path: Path,
        *,
        quantization: str = "F32",
        split: Mapping[str, Any] | None = None,
        **metadata: Any,
    ) -> Path:
        """Write the model in `folder` as a GGUF file. `metadata` changes keys (with __ for a dot; None: takes away).

        `split`: what GGUFWriter is to cut it into parts by.
        """
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        writer = gguf.GGUFWriter(path, self.architecture, **(split or {}))
        keys = _KEYS.get(self.architecture, _llama_keys)(config)
        for key, value in (keys | {key.replace("__", "."): value for key, value in metadata.items()}).items():
            if value is not None:
                add(writer, f"{self.architecture}.{key}", value)
        add_tokenizer(writer, folder, {**_SHAPE, "eos_token_id": [EOS_TOKEN_ID]}, "gpt-2")
        for name, tensor in self._tensors(config, load_file(folder / "model.safetensors")):
            add_tensor(writer, name, tensor, quantization)
        for name, factors in _rotary_factors(config).items():
            add_tensor(writer, name, torch.tensor(factors), "F32")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _tensors(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        layers = config.get("num_hidden_layers", config.get("n_layer"))
        known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        names = gguf.get_tensor_name_map(known[self.architecture], layers)
        for name, tensor in _with_stacked_experts(weights):
            stem, _, kind = name.rpartition(".")
            yield f"{names.get_name(stem)}.{kind}", self._converted(config, name, tensor)

    def _converted(self, config: Mapping[str, Any], name: str, tensor: Tensor) -> Tensor:
        if self.interleaved and ("q_proj" in name or "k_proj" in name):
            return interleaved(tensor, config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
        if self.plus_one and name.endswith("norm.weight"):
            return tensor + 1
        if self.architecture == "gpt2" and tensor.dim() == 2 and ".h." in name:
            return tensor.T.contiguous()
        if self.architecture == "gptneox" and "query_key_value" in name:
            by_head = tensor.unflatten(0, (config["num_attention_heads"], 3, -1))
            return by_head.transpose(0, 1).flatten(0, 2)
        return tensor


def _randomize(parameter: Tensor) -> None:
    """Draw a weight at a scale that makes it matter; a vector keeps what it is around."""
    if parameter.dim() == 1:
        parameter.add_(0.2 * torch.randn_like(parameter))
    elif parameter.shape[0] in (VOCAB_SIZE, 256):
        parameter.normal_(0, 0.1)
    else:
        parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)


def _with_stacked_experts(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, tensor in weights.items():
        before, found, after = name.partition(".experts.")
        if not found:
            yield name, tensor
            continue
        expert, _, rest = after.partition(".")
        layer = before.removesuffix(".block_sparse_moe").removesuffix(".mlp").removeprefix("model.")
        merged = f"{layer}.feed_forward.experts.{rest}" if "block_sparse" in before else f"{before}.experts.{rest}"
        stacks.setdefault(merged, {})[int(expert)] = tensor
    for name, experts in stacks.items():
        yield name, torch.stack([experts[expert] for expert in sorted(experts)])


def _rotary_factors(config: Mapping[str, Any]) -> dict[str, list[float]]:
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "longrope":
        return {}
    return {"rope_factors_long.weight": rope["long_factor"], "rope_factors_short.weight": rope["short_factor"]}


def _llama_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    keys: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": rope["rope_theta"],
        "vocab_size": config["vocab_size"],
    }
    if rope.get("rope_type") in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope.get("rope_type") == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return keys


def _llama_own_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    keys = _llama_keys(config)
    if config.get("num_local_experts"):
        keys |= {"expert_count": config["num_local_experts"], "expert_used_count": config["num_experts_per_tok"]}
    return keys | {"rope.dimension_count": keys["attention.key_length"]}


def _qwen3moe_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    return _llama_keys(config) | {
        "expert_count": config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
    }


def _gemma_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    keys = _llama_keys(config) | {
        "rope.freq_base": None,
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "attention.sliding_window": config.get("sliding_window"),
    }
    rope = config["rope_parameters"]
    if "full_attention" in rope and "sliding_attention" in rope:
        keys["rope.freq_base"] = rope["full_attention"]["rope_theta"]
    return keys


def _olmo2_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    return _llama_keys(config) | {"attention.sliding_window": config.get("sliding_window")}


def _phi3_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    keys = _llama_keys(config)
    rope = config["rope_parameters"]
    dimensions = int(rope.get("partial_rotary_factor", 1.0) * keys["attention.key_length"])
    keys |= {
        "rope.dimension_count": dimensions,
        "rope.scaling.original_context_length": config["original_max_position_embeddings"],
        "attention.sliding_window": config["sliding_window"] or 0,
        "attention.key_length": None,
        "attention.value_length": None,
    }
    if rope.get("rope_type") == "longrope":
        from math import log, sqrt

        scale = config["max_position_embeddings"] / config["original_max_position_embeddings"]
        keys["rope.scaling.attn_factor"] = sqrt(1 + log(scale) / log(config["original_max_position_embeddings"]))
    return keys


def _granite_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    return _llama_own_keys(config) | {
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
    }


def _gpt2_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "block_count": config["n_layer"],
        "context_length": config["n_positions"],
        "embedding_length": config["n_embd"],
        "feed_forward_length": 4 * config["n_embd"],
        "attention.head_count": config["n_head"],
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
    }


def _gptneox_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "rope.dimension_count": int(config["rope_parameters"]["partial_rotary_factor"] * head_dim),
        "attention.head_count": config["num_attention_heads"],
        "use_parallel_residual": config["use_parallel_residual"],
        "attention.layer_norm_epsilon": config["layer_norm_eps"],
    }


_KEYS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "llama": _llama_own_keys,
    "smollm3": _llama_own_keys,
    "qwen3moe": _qwen3moe_keys,
    "gemma": _gemma_keys,
    "gemma2": _gemma_keys,
    "gemma3": _gemma_keys,
    "phi3": _phi3_keys,
    "olmo2": _olmo2_keys,
    "granite": _granite_keys,
    "gpt2": _gpt2_keys,
    "gptneox": _gptneox_keys,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
_LONGROPE = {
    "rope_type": "longrope",
    "long_factor": _LONG,
    "short_factor": _SHORT,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
}
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
GGUF_FAMILIES = {
    "llama": GgufFamily("LlamaForCausalLM", "llama", {"head_dim": 24}, interleaved=True),
    "llama with biases": GgufFamily(
        "LlamaForCausalLM", "llama", {"attention_bias": True, "mlp_bias": True}, interleaved=True
    ),
    "mistral": GgufFamily("MistralForCausalLM", "llama", {"sliding_window": None}, interleaved=True),
    "mixtral": GgufFamily(
        "MixtralForCausalLM", "llama", {"num_local_experts": 4, "num_experts_per_tok": 2}, interleaved=True
    ),
    "qwen2": GgufFamily("Qwen2ForCausalLM", "qwen2"),
    "qwen2 yarn": GgufFamily("Qwen2ForCausalLM", "qwen2", {"rope_parameters": _YARN}),
    "qwen3": GgufFamily("Qwen3ForCausalLM", "qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3 moe": GgufFamily(
        "Qwen3MoeForCausalLM",
        "qwen3moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "gemma": GgufFamily("GemmaForCausalLM", "gemma", {"head_dim": 24}, plus_one=True),
    "gemma 2": GgufFamily(
        "Gemma2ForCausalLM",
        "gemma2",
        {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 6, "final_logit_softcapping": 20.0},
        plus_one=True,
    ),
    "gemma 3": GgufFamily(
        "Gemma3ForCausalLM",
        "gemma3",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 24,
            "num_hidden_layers": 7,
            "sliding_window": 6,
            "rope_parameters": _GEMMA3_ROPE,
        },
        plus_one=True,
    ),
    "phi 3": GgufFamily("Phi3ForCausalLM", "phi3", {"sliding_window": 6, "original_max_position_embeddings": 256}),
    "phi 3 longrope": GgufFamily(
        "Phi3ForCausalLM",
        "phi3",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64},
    ),
    "olmo 2": GgufFamily("Olmo2ForCausalLM", "olmo2"),
    "olmo 3": GgufFamily(
        "Olmo3ForCausalLM",
        "olmo2",
        {
            "num_hidden_layers": 4,
            "sliding_window": 6,
            "rope_parameters": {
                "full_attention": _YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "granite": GgufFamily(
        "GraniteForCausalLM",
        "granite",
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
            "tie_word_embeddings": True,
        },
        interleaved=True,
    ),
    "smollm 3": GgufFamily("SmolLM3ForCausalLM", "smollm3", {"num_hidden_layers": 5}, interleaved=True),
    "gpt 2": GgufFamily("GPT2LMHeadModel", "gpt2"),
    "gpt neox": GgufFamily("GPTNeoXForCausalLM", "gptneox"),
    "gpt neox in sequence": GgufFamily("GPTNeoXForCausalLM", "gptneox", {"use_parallel_residual": False}),
}
"""By what a test calls them."""
