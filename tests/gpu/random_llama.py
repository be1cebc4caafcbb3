"""Llamas of any shape with random weights: as a checkpoint that is nowhere on disk, and what one on disk would hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from factories import EOS_TOKEN_ID
from random_decoder import Shape
from torch import Tensor

from executor_svc.weights.checkpoint import Region


def config_of(shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """The fields of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def tensors_of(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape, by name."""
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, hidden)}
    for index in range(shape.layers):
        layer = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (shape.intermediate, hidden),
            "mlp.up_proj": (shape.intermediate, hidden),
            "mlp.down_proj": (hidden, shape.intermediate),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes |= {f"model.layers.{index}.{name}.weight": each for name, each in layer.items()}
    return shapes | {"model.norm.weight": (hidden,)}


def scale_of(name: str, shape: tuple[int, ...]) -> float | None:
    """How far a tensor's numbers lie from 0; None: all of them are 1."""
    if len(shape) == 1:
        return None
    return 0.1 if "embed" in name else float(shape[1] ** -0.5)


class RandomCheckpoint:
    """See Checkpoint. Tensors are drawn where they are wanted."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        self.path = Path(shape.name)
        self.config: Mapping[str, Any] = config_of(shape, dtype)
        self.shapes: Mapping[str, tuple[int, ...]] = tensors_of(shape)
        self.unreadable: Mapping[str, str] = {}

    def file_of(self, name: str) -> Path:
        """See Checkpoint."""
        return self.path

    def copy_to(self, name: str, out: Tensor, region: Region | None = None) -> None:
        """See Checkpoint."""
        assert region is None, "this model is not divided"
        scale = scale_of(name, self.shapes[name])
        if scale is None:
            out.fill_(1.0)
        else:
            out.normal_(0.0, scale)
