"""Tiny random models on disk, in the Hugging Face folder format. Deterministic by seed, made in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

from octavo.models.prepare import prepare
from octavo.models.prepared import PreparedModel, open_prepared

PAD_TOKEN_ID, BOS_TOKEN_ID, EOS_TOKEN_ID = 0, 1, 2
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# fmt: off
MERGES = (
    "t h", "th e", "Ġ t", "Ġt h", "Ġth e", "i n", "a n", "e r", "o n", "r e", "Ġ a", "Ġ s", "e n", "o u", "in g",
    "an d", "Ġ w",
)
# fmt: on
TOKENIZER_SIZE = len(SPECIAL_TOKENS) + 256 + len(MERGES)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

MODEL_TYPES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "MistralForCausalLM": "mistral"}


def prepared_from(folder: Path) -> PreparedModel:
    """Prepare a Hugging Face folder and open it."""
    prepare(str(folder))
    return open_prepared(str(folder))


def make_llama(
    folder: Path,
    *,
    seed: int = 0,
    architecture: str = "LlamaForCausalLM",
    vocab_size: int = 320,
    hidden_size: int = 48,
    intermediate_size: int = 80,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    tie: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    rope_theta: float = 10000.0,
    rope_scaling: Mapping[str, Any] | None = None,
    max_position_embeddings: int = 2048,
    rms_norm_eps: float = 1e-5,
    dtype: torch.dtype = torch.float32,
    num_shards: int = 1,
    eos_token_ids: Sequence[int] = (EOS_TOKEN_ID,),
    add_bos: bool = False,
    generation: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a Llama-like model and its tokenizer into `folder` and return it.

    `architecture` "Qwen2ForCausalLM" has biases on Q, K and V alone; `attention_bias` puts one on O too (Llama).
    `rope_scaling` is written as config.json has it. `generation` adds to generation_config.json, `config` to
    config.json (None removes).
    """
    folder.mkdir(parents=True, exist_ok=True)
    assert vocab_size >= TOKENIZER_SIZE, f"the tokenizer has {TOKENIZER_SIZE} tokens"
    fields: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": MODEL_TYPES.get(architecture, "llama"),
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim or hidden_size // num_heads,
        "hidden_act": "silu",
        "rms_norm_eps": rms_norm_eps,
        "max_position_embeddings": max_position_embeddings,
        "rope_theta": rope_theta,
        "rope_scaling": dict(rope_scaling) if rope_scaling else None,
        "tie_word_embeddings": tie,
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": list(eos_token_ids),
        "pad_token_id": PAD_TOKEN_ID,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if architecture == "LlamaForCausalLM":
        fields |= {"attention_bias": attention_bias, "mlp_bias": mlp_bias}
    if architecture == "MistralForCausalLM":
        fields["sliding_window"] = None
    for name, value in (config or {}).items():
        fields[name] = value
    _write_json(folder / "config.json", fields)
    weights = random_weights(fields, seed=seed, qkv_bias=architecture == "Qwen2ForCausalLM", dtype=dtype)
    save_weights(folder, weights, num_shards=num_shards)
    defaults = {"bos_token_id": BOS_TOKEN_ID, "eos_token_id": list(eos_token_ids), "pad_token_id": PAD_TOKEN_ID}
    _write_json(folder / "generation_config.json", defaults | dict(generation or {}))
    make_tokenizer(folder, add_bos=add_bos)
    return folder


def random_weights(config: Mapping[str, Any], *, seed: int, qkv_bias: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """Draw every tensor, in checkpoint names, at scales that make each of them matter to the output."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}

    def linear(name: str, out_features: int, in_features: int, *, bias: bool, gain: float = 1.5) -> None:
        scale = gain / in_features**0.5
        weights[f"{name}.weight"] = scale * torch.randn(out_features, in_features, generator=generator)
        if bias:
            weights[f"{name}.bias"] = torch.randn(out_features, generator=generator) * 0.3

    def norm(name: str) -> None:
        weights[f"{name}.weight"] = 1.0 + 0.2 * torch.randn(config["hidden_size"], generator=generator)

    hidden, intermediate, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    attention_bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    # A small embedding leaves the residual stream to the layers; with a large one a tied model only repeats its input.
    weights["model.embed_tokens.weight"] = 0.1 * torch.randn(vocab, hidden, generator=generator)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        norm(f"{layer}.input_layernorm")
        linear(f"{layer}.self_attn.q_proj", query_size, hidden, bias=attention_bias or qkv_bias)
        linear(f"{layer}.self_attn.k_proj", kv_size, hidden, bias=attention_bias or qkv_bias)
        linear(f"{layer}.self_attn.v_proj", kv_size, hidden, bias=attention_bias or qkv_bias)
        linear(f"{layer}.self_attn.o_proj", hidden, query_size, bias=attention_bias)
        norm(f"{layer}.post_attention_layernorm")
        linear(f"{layer}.mlp.gate_proj", intermediate, hidden, bias=mlp_bias)
        linear(f"{layer}.mlp.up_proj", intermediate, hidden, bias=mlp_bias)
        linear(f"{layer}.mlp.down_proj", hidden, intermediate, bias=mlp_bias)
    norm("model.norm")
    if not config["tie_word_embeddings"]:
        linear("lm_head", vocab, hidden, bias=False)
    return {name: tensor.to(dtype) for name, tensor in weights.items()}


def save_weights(folder: Path, weights: Mapping[str, Tensor], *, num_shards: int = 1) -> None:
    """Write model.safetensors, or as many shards with their index."""
    if num_shards == 1:
        save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(weights)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::num_shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def make_tokenizer(folder: Path, *, add_bos: bool = False) -> None:
    """Write a byte-level BPE tokenizer: three specials, the 256 bytes, a few merges. Any text round-trips."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*SPECIAL_TOKENS, *alphabet, *(merge.replace(" ", "") for merge in MERGES)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [(left, right) for left, right in (merge.split(" ") for merge in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    if add_bos:
        bos = SPECIAL_TOKENS[BOS_TOKEN_ID]
        template = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, BOS_TOKEN_ID)])
        tokenizer.post_processor = template
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS_TOKEN_ID],
        "eos_token": SPECIAL_TOKENS[EOS_TOKEN_ID],
        "pad_token": SPECIAL_TOKENS[PAD_TOKEN_ID],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
