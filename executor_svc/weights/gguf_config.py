"""What a GGUF file's metadata says, in the words of config.json, and its tensor names in those of a Hugging Face
checkpoint.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from executor_svc.weights.errors import ModelLoadError, UnsupportedModelError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
"""GGUF's name of an architecture to config.json's. GGUF's "llama" covers Mistral too."""
INTERLEAVED_ROTARY = frozenset({"llama"})
"""Architectures whose Q and K rows GGUF reorders, so that the two members of a rotary pair are neighbours."""
ROPE_FREQS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, float32 [head_dim / 2]: how GGUF stores the Llama-3 scaling."""

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def checkpoint_name(name: str) -> str:
    """Translate a tensor's name; one that has no translation stays as it is."""
    stem, _, kind = name.rpartition(".")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{kind}"
    prefix, _, rest = stem.partition(".")
    index, _, part = rest.partition(".")
    if prefix == "blk" and part in _BLOCK:
        return f"model.layers.{index}.{_BLOCK[part]}.{kind}"
    return name


def config_fields(
    path: Path, metadata: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], rope_freqs: list[float] | None
) -> dict[str, Any]:
    """Give the fields of config.json. `shapes` is by translated name; `path` is for messages.

    Raises UnsupportedModelError on an architecture or setting that is not known, ModelLoadError where a key is missing.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModelError(f"{path}: architecture {architecture!r} is not supported; supported: {known}")
    keys = _Keys(path, metadata, architecture)
    if keys.get("expert_count", 0):
        raise UnsupportedModelError(f"{path}: routed experts ({keys.name('expert_count')}) are not supported")
    num_heads, hidden_size = keys.required("attention.head_count"), keys.required("embedding_length")
    num_kv_heads = keys.get("attention.head_count_kv", num_heads)
    for each in (num_heads, num_kv_heads):
        if not isinstance(each, int):
            raise UnsupportedModelError(f"{path}: head counts that differ between layers are not supported: {each}")
    head_dim = keys.get("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.get(key, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{path}: {keys.name(key)} {keys.get(key)} other than the key length {head_dim} is not supported"
            )
    embedding = shapes.get("model.embed_tokens.weight")
    if not embedding:
        raise ModelLoadError(f"{path} has no tensor token_embd.weight")
    layer = "model.layers.0"
    return {
        "architectures": [ARCHITECTURES[architecture]],
        "vocab_size": embedding[0],
        "hidden_size": hidden_size,
        "intermediate_size": keys.required("feed_forward_length"),
        "num_hidden_layers": keys.required("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": keys.required("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.required("context_length"),
        "attention_bias": _has(shapes, f"{layer}.self_attn.q_proj.bias"),
        "mlp_bias": _has(shapes, f"{layer}.mlp.gate_proj.bias"),
        "tie_word_embeddings": not _has(shapes, "lm_head.weight"),
        "rope_parameters": {"rope_theta": keys.get("rope.freq_base", 10000.0), **_scaling(keys, rope_freqs)},
    }


def _scaling(keys: _Keys, rope_freqs: list[float] | None) -> dict[str, Any]:
    kind = keys.get("rope.scaling.type", "none")
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 1.0))
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{keys.path}: rotary scaling {kind!r} is not supported; supported: none, linear, yarn"
        )
    if rope_freqs is not None:
        if kind != "none":
            raise UnsupportedModelError(f"{keys.path}: rotary scaling {kind!r} together with {ROPE_FREQS}")
        return {"rope_type": "frequency_factors", "factors": rope_freqs}
    if kind == "yarn":
        attention_factor = keys.get("rope.scaling.attn_factor", 1.0) * (0.1 * math.log(factor) + 1.0)
        yarn = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": keys.required("rope.scaling.original_context_length"),
            "attention_factor": attention_factor,
            "beta_fast": keys.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": keys.get("rope.scaling.yarn_beta_slow"),
        }
        return {key: value for key, value in yarn.items() if value is not None}
    return {"rope_type": "linear", "factor": factor} if factor != 1.0 else {"rope_type": "default"}


def _has(shapes: Collection[str], name: str) -> bool:
    return name in shapes


class _Keys:
    """The metadata of one architecture."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], architecture: str) -> None:
        self.path = path
        self._metadata = metadata
        self._architecture = architecture

    def name(self, key: str) -> str:
        return f"{self._architecture}.{key}"

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(self.name(key), default)

    def required(self, key: str) -> Any:
        if self.name(key) not in self._metadata:
            raise ModelLoadError(f"{self.path} lacks {self.name(key)}")
        return self._metadata[self.name(key)]
