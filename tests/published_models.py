"""Models as they were published: their config.json, made small, and what their files of weights hold and lack.

What transformers saves today looks otherwise. The fields are those of the published files, in the words of the version
that wrote them, those too that nobody reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from model_variations import randomize
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

Weights = dict[str, Tensor]
Dress = Callable[[Weights], Weights]


@dataclass(frozen=True)
class Published:
    """`config` goes over the sizes and the fields that all files have. `dress` makes the published tensors out of those
    that transformers saves.
    """

    architecture: str
    model_type: str
    config: Mapping[str, Any]
    dress: Dress = lambda weights: weights
    sizes: Mapping[str, Any] = field(default_factory=lambda: SIZES)
    for_transformers: Mapping[str, Any] = field(default_factory=dict)
    """Fields that transformers is given instead: what it no longer reads, in today's words."""
    max_model_len: int = 128
    shards: tuple[str, ...] = ("model.safetensors",)
    """Names of the files of weights; where there are several an index names them."""

    def save(self, folder: Path) -> Any:
        """Write the model into `folder` and return it as transformers has it, in float32."""
        folder.mkdir(exist_ok=True)
        own = {"architectures": [self.architecture], "model_type": self.model_type}
        config = {**own, "torch_dtype": "bfloat16", "use_cache": True, **self.sizes, **self.config}
        written = {key: value for key, value in config.items() if value is not LEFT_OUT}
        (folder / "config.json").write_text(json.dumps({**written, **self.for_transformers}), encoding="utf-8")
        theirs = AutoConfig.from_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(written, indent=2), encoding="utf-8")
        model = AutoModelForCausalLM.from_config(theirs, dtype=torch.float32)
        randomize(model, 0)
        model.eval().save_pretrained(folder / "saved")
        self._write_weights(folder, self.dress(load_file(folder / "saved" / "model.safetensors")))
        return model

    def _write_weights(self, folder: Path, weights: Weights) -> None:
        index = {}
        for number, shard in enumerate(self.shards):
            part = {name: weights[name].contiguous() for name in sorted(weights)[number :: len(self.shards)]}
            save_file(part, folder / shard)
            index |= dict.fromkeys(part, shard)
        if len(self.shards) > 1:
            document = {"metadata": {"total_size": 1}, "weight_map": index}
            (folder / "model.safetensors.index.json").write_text(json.dumps(document), encoding="utf-8")


LEFT_OUT: Any = object()
"""Stands for a field that the file does not have."""
SIZES = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def with_tensors(names: str, *tensors: tuple[str, Tensor]) -> Dress:
    """Add to each layer, named by `names` with {} for its number, tensors that are not needed."""

    def dress(weights: Weights) -> Weights:
        places = [(f"{names.format(layer)}.{name}", tensor) for layer in range(2) for name, tensor in tensors]
        return weights | {name: tensor.clone() for name, tensor in places}

    return dress


def without_prefix(prefix: str, *more: tuple[str, Tensor]) -> Dress:
    """Take the first part of the names away, as in what is saved without a head, and add some tensors."""

    def dress(weights: Weights) -> Weights:
        kept = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
        return kept | dict(more)

    return dress


def both(first: Dress, second: Dress) -> Dress:
    """Do one after the other."""
    return lambda weights: second(first(weights))


def with_head(embedding: str, head: str = "lm_head.weight") -> Dress:
    """Write a tied head out too."""
    return lambda weights: weights | {head: weights[embedding].clone()}
