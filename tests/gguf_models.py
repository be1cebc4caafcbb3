"""GGUF files made from the tiny models of `factories`: the same weights, GGUF's names, order of rows and metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from factories import CHAT_TEMPLATE, SPECIAL_TOKENS
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from torch import Tensor

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def make_gguf(
    folder: Path,
    path: Path,
    *,
    quantization: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    rope_freqs: Tensor | None = None,
    extra: Mapping[str, Tensor] | None = None,
    tokenizer_pre: str = "gpt-2",
    packed: Mapping[str, tuple[npt.NDArray[np.uint8], gguf.GGMLQuantizationType]] | None = None,
) -> Path:
    """Write the model in `folder` (of one safetensors file) as a GGUF file and return its path.

    `quantization` is the element type of matrices; vectors stay F32. `metadata` adds keys of numbers or strings,
    without the architecture's prefix, or takes them away (None); `extra` adds tensors. Rotary scalings of config.json
    are not written: they are for `metadata` and `rope_freqs` to say. `packed` has matrices by the checkpoint's names
    that are written as they are, each with its element type.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture = "qwen2" if config["model_type"] == "qwen2" else "llama"
    writer = gguf.GGUFWriter(path, architecture)
    keys: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
        "rope.dimension_count": config["head_dim"],
    }
    for key, value in (keys | dict(metadata or {})).items():
        if value is not None:
            add(writer, f"{architecture}.{key}", value)
    add_tokenizer(writer, folder, config, tokenizer_pre)
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name in (packed or {}):
            rows, kind = packed[name]  # type: ignore[index]
            writer.add_tensor(_gguf_name(name), rows, raw_dtype=kind)
            continue
        values = tensor.float()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            values = interleaved(values, config["head_dim"])
        add_tensor(writer, _gguf_name(name), values, quantization)
    if rope_freqs is not None:
        add_tensor(writer, "rope_freqs.weight", rope_freqs, "F32")
    for name, tensor in (extra or {}).items():
        add_tensor(writer, name, tensor, quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def superblocks_of_spread(
    kind: gguf.GGMLQuantizationType, shape: Sequence[int], seed: int, spread: float
) -> npt.NDArray[np.uint8]:
    """Return random packed rows of a matrix of `shape` whose numbers stray from 0 by about `spread`."""
    once = dequantize(random_superblocks(kind, shape, seed), kind)
    return random_superblocks(kind, shape, seed, scale=spread / float(np.sqrt((once**2).mean())))


def random_superblocks(
    kind: gguf.GGMLQuantizationType, shape: Sequence[int], seed: int, *, scale: float = 1.0
) -> npt.NDArray[np.uint8]:
    """Return random packed rows of a matrix of `shape`, of a type whose blocks have finite scales in float16.

    `scale` multiplies these.
    """
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (shape[0], shape[1] // elements, size), dtype=np.uint8)
    for at in _SCALES[kind.name]:
        scales = (scale * random.uniform(0.001, 0.01, blocks.shape[:2])).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
_SCALES |= {"IQ4_NL": (0,), "IQ4_XS": (0,)}
"""Bytes of a block at which its float16 scales begin."""


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    _, _, index, part = stem.split(".", 3)
    return f"blk.{index}.{_LAYER[part]}.{kind}"


def interleaved(values: Tensor, head_dim: int) -> Tensor:
    """Put row i + head_dim / 2 of each head behind its row i."""
    halves = values.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).flatten(0, 2)


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a key of metadata: a float as float32, a whole number as uint32."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_uint32(key, value)


def add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor, quantization: str) -> None:
    """Add a tensor: a matrix of the element type that `quantization` names, a vector as F32."""
    values = tensor.float().numpy()
    kind = gguf.GGMLQuantizationType[quantization]
    if kind == gguf.GGMLQuantizationType.F32 or tensor.dim() == 1:
        writer.add_tensor(name, np.ascontiguousarray(values))
    elif kind == gguf.GGMLQuantizationType.F16:
        writer.add_tensor(name, values.astype(np.float16))
    else:
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: Mapping[str, Any], pre: str) -> None:
    """Add the byte-level tokenizer of a folder; `config` says its special tokens and the size of the vocabulary."""
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    # A GGUF file has a token for every row of the embedding.
    tokens += [f"[PAD{index}]" for index in range(len(tokens), config["vocab_size"])]
    kinds = []
    for token in tokens:
        if token in SPECIAL_TOKENS:
            kinds.append(gguf.TokenType.CONTROL)
        else:
            kinds.append(gguf.TokenType.UNUSED if token.startswith("[PAD") else gguf.TokenType.NORMAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"][0])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_chat_template(CHAT_TEMPLATE)
