"""Models of every family as their graphs, loaded and run step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from model_variations import Variation, save_variation
from paged import PagedLoop, PagedSequence, ragged_metadata
from torch import Tensor

from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.optimize import PASSES
from executor_svc.graph.passes.base import Pass
from executor_svc.kernels import KernelSet
from executor_svc.kv_cache import KVCache
from executor_svc.models import CausalLM, ModelConfig, load_weights
from executor_svc.models.loader import describe
from executor_svc.models.plain import capture_decoder
from executor_svc.models.spec import DecoderSpec
from executor_svc.weights import open_checkpoint

CPU = torch.device("cpu")
BLOCK_SIZE = 8
PROMPT = [5 + 7 * place % 300 for place in range(29)]


def described(folder: Path) -> tuple[ModelConfig, DecoderSpec]:
    """Return what a folder's model is."""
    return describe(open_checkpoint(folder))


def plain_graph(folder: Path) -> ModelGraph:
    """Capture a folder's model."""
    return capture_decoder(*described(folder))


def load(folder: Path, one: Variation, kernels: KernelSet, passes: Sequence[Pass] = PASSES) -> CausalLM:
    """Load a saved variation in float32."""
    return load_weights(folder, torch.float32, CPU, kernels, max_model_len=one.max_model_len, passes=passes)


def logits_of(model: CausalLM) -> Tensor:
    """Run the prompt in chunks and then token by token; return the logits of all steps."""
    loop, sequence = PagedLoop(model, num_blocks=64, block_size=BLOCK_SIZE), PagedSequence(PROMPT)
    return torch.stack([loop.step([(sequence, size)])[0].clone() for size in (7, 7, 11, 1, 1, 1, 1)])


@dataclass(frozen=True)
class Step:
    """A step's inputs as capture_decoder has them."""

    inputs: list[Tensor]
    attention: object
    kv_cache: KVCache


def step_of(config: ModelConfig, kernels: KernelSet, dtype: torch.dtype, tokens: int = 3) -> Step:
    """Return a step of one row of so many tokens, behind 4 others that are all zero."""
    metadata = ragged_metadata([([1, 2], 4, tokens)], BLOCK_SIZE)
    cache = KVCache.allocate(config, 4, BLOCK_SIZE, dtype, CPU)
    for tensor in (*cache.keys, *cache.values):
        tensor.zero_()
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(tokens, config.hidden_size, generator=generator).to(dtype), metadata.slot_mapping]
    for rotary in config.rotaries:
        angles = torch.rand(tokens, rotary.rotary_dim // 2, generator=generator)
        inputs += [angles.cos(), angles.sin()]
    if any(layer.rotary is None for layer in config.layers):
        inputs += [torch.empty(tokens, 0), torch.empty(tokens, 0)]
    return Step(inputs, kernels.plan_attention(metadata, BLOCK_SIZE), cache)


@cache
def _folder(root: Path, one: Variation) -> Path:
    folder = root / one.id.replace(" ", "-").replace(",", "")
    folder.mkdir()
    save_variation(folder, one)
    return folder


def saved_folder(root: Path, one: Variation) -> Path:
    """Return the folder of a variation below `root`, saved once."""
    return _folder(root, one)
