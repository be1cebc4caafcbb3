"""Any other causal language model that transformers can load: its own modelling code over Octavo's paged memory.

Its layers are captured as a graph, fused, and run by the kernel set (transformers_graph.py), where all that they do is
known; else as that code has them, which is slower: nothing is fused, weights are not packed. What cannot run is refused
before it serves: on the meta device, where nothing is computed, or by a check of the loaded model that its output
depends on nothing but a sequence's own tokens.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from executor_svc.attention import AttentionMetadata
from executor_svc.graph.optimize import PASSES
from executor_svc.graph.passes.base import Pass
from executor_svc.kernels import KernelSet
from executor_svc.kv_cache import KVCache
from executor_svc.models.paged_interface import NAME, LayerAttention, PagedContext, RefusedAttentionError
from executor_svc.models.parameters import Progress
from executor_svc.models.transformers_graph import GraphLayers, compile_layers, release
from executor_svc.weights import UnsupportedModelError, WeightsError
from executor_svc.weights.finite import check_finite
from octavo.models.errors import ModelError
from octavo.models.folder_source import read_config
from octavo.models.servable import why_not_served

logger = logging.getLogger(__name__)

_UNFIT_ROTARY = ("dynamic", "longrope")
"""Rotary types by which transformers turns all sequences of a batch as the longest one is to be."""
_BYPASS = "its attention does not go through transformers' attention interface"
_CODE_FAILS = "its code does not run as Octavo calls it"
_NEEDS_NUMBERS = "its code goes by the numbers in its tensors, so what it does cannot be seen before they are read"
_PROBE_TOKENS = 4
_FLOAT32_BOUND, _NARROW_BOUND = 1e-3, 0.1
"""Of the largest hidden state: what two ways of computing the same may differ by."""


@dataclass(frozen=True)
class TransformersConfig:
    """What Octavo asks about such a model."""

    architecture: str
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    window: int
    """See ModelConfig."""

    @property
    def unstretched_length(self) -> int:
        """See ModelConfig."""
        return self.max_position_embeddings


class TransformersLM:
    """A loaded model. See CausalLM of the decoder."""

    code = "transformers"
    """Whose code it is. Its linear layers are torch's, whose bits depend on how many rows there are."""

    def __init__(self, model: Any, config: TransformersConfig, context: PagedContext) -> None:
        self.config = config
        self._base = model.base_model
        self._context = context
        self._given = _Given()
        self.graph: GraphLayers | None = None
        """What runs the layers; None: the model's own code."""
        self._head = copy.copy(model)
        self._head._modules = {**model._modules, model.base_model_prefix: self._given}

    def install(self, model: nn.Module) -> None:
        """Have the layers of a model attend as this one does."""
        self._context.install(model)

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, kv_cache: KVCache) -> Tensor:
        """Give the last hidden states, after the final norm: [T, hidden] of the model's dtype, until the next call."""
        if self.graph is not None:
            return self.graph.forward(token_ids, metadata, kv_cache)
        self._context.begin(metadata, kv_cache)
        output = self._base(input_ids=token_ids[None], position_ids=metadata.positions[None], use_cache=False)
        self._given.output_class = type(output)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Give the logits, a new float32 [N, vocab_size], by all that the model's code does behind its layers."""
        if not len(hidden):
            return hidden.new_empty((0, self.config.vocab_size)).float()
        self._given.hidden = hidden[None]
        ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
        logits: Tensor = self._head(input_ids=ids, use_cache=False).logits[0].float()
        return logits

    def logits_of(self, output: Any) -> Tensor:
        """Give the logits of what the model's own layers gave, of one sequence; on the meta device too."""
        self._given.output_class = type(output)
        return self.compute_logits(output.last_hidden_state[0])

    def likeliest(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:  # noqa: ARG002 - what the others take
        """None: what the model's code does behind its layers gives logits."""
        return None


class _Given(nn.Module):
    """Stands for the layers: gives the hidden states that it was given."""

    hidden: Tensor
    output_class: Any = None
    """The layers' own, known once these have run as the model's code has them."""

    def forward(self, *_: Any, **__: Any) -> Any:
        """Give what the layers would."""
        return self.output_class(last_hidden_state=self.hidden)


def read_transformers_config(path: Path) -> TransformersConfig:
    """Return what a folder's model is, its layers tried on the meta device. Raises UnsupportedModelError with the
    reason where it cannot run, ModelLoadError where the folder cannot be read.
    """
    return describe_on_meta(path)[0]


def describe_on_meta(path: Path) -> tuple[TransformersConfig, Any]:
    """Do as read_transformers_config; return the model on the meta device too."""
    config = _open_config(path)
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, trust_remote_code=False)
        except KeyError:
            # The code looks up a class of its own by the name of the interface.
            raise _refused(path, config, _BYPASS) from None
        except Exception as error:  # whatever an odd field leads its code to
            raise _refused(path, config, _first_line(error)) from None
    return _probe(path, config, model), model.eval()


def load_transformers_lm(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    kernels: KernelSet,
    progress: Progress | None = None,
    *,
    allow_pickle: bool = False,
    passes: Sequence[Pass] = PASSES,
) -> TransformersLM:
    """Load a folder's weights. Raises as read_transformers_config does, and WeightsError where tensors are missing, or
    do not belong to the model. `allow_pickle`: take PyTorch's files where there is no safetensors file, by its
    weights-only reader.
    """
    described = read_transformers_config(path)
    transformers.logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=_open_config(path),
            attn_implementation=NAME,
            dtype=dtype,
            device_map=None,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=None if allow_pickle else True,
            weights_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # whatever an odd tensor leads its code to
        raise WeightsError(f"{path}: {_first_line(error)}") from None
    model, found = loaded
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found.get(problem):
            names = ", ".join(sorted(map(str, found[problem]))[:8])
            raise WeightsError(f"{path}: tensors are {problem.removesuffix('_keys')}: {names}")
    for name, weight in model.named_parameters():
        check_finite(path, name, weight.detach())
    context = PagedContext(kernels)
    context.install(model)
    served = TransformersLM(model.to(device).eval(), described, context)
    if progress is not None:
        total = sum(weight.numel() for weight in model.parameters())
        progress(total, total)
    _check_runs(path, served, dtype, device)
    _take_graph(served, model, kernels, passes, device)
    return served


def _take_graph(
    served: TransformersLM, model: Any, kernels: KernelSet, passes: Sequence[Pass], device: torch.device
) -> None:
    """Have the layers run as a graph, where they can be one and it computes what they do."""
    layers = compile_layers(model, served.config, kernels, passes)
    served.install(model)
    if layers is None:
        return
    dtype = next(model.parameters()).dtype
    ids = torch.arange(5, 12, device=device) % served.config.vocab_size
    steps = [[(0, ids[:4])], [(0, ids[4:6]), (1, ids[:2])]]
    with torch.inference_mode():
        expected = torch.cat(_run(served, dtype, device, steps))
        served.graph = layers
        given = torch.cat(_run(served, dtype, device, steps))
    difference = float((given - expected).abs().max() / expected.abs().max())
    if not difference <= (_FLOAT32_BOUND if dtype == torch.float32 else _NARROW_BOUND):
        served.graph = None
        fields = {"architecture": served.config.architecture, "difference": difference}
        logger.error("the graph of the layers does not compute what their code does", extra={"fields": fields})
        return
    release(model, layers.replaced)
    layers.replaced = ()


def _open_config(path: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever an odd field led it to
        cause = _of_own_code(path) or _first_line(error)
        raise UnsupportedModelError(f"{path}: transformers cannot read this model: {cause}") from None
    if (reason := why_not_served(path, config.to_dict())) is not None:
        raise UnsupportedModelError(f"{path}: {reason}")
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _refused(path, config, f"transformers has no causal language model for model_type {config.model_type!r}")
    text = config.get_text_config()
    for name in ("vocab_size", "max_position_embeddings", "num_hidden_layers"):
        if not isinstance(getattr(text, name, None), int):
            raise _refused(path, config, f"its config has no {name}")
    rotary = _rotary_types(getattr(text, "rope_parameters", None))
    if rotary & set(_UNFIT_ROTARY):
        raise _refused(path, config, f"its rotary type {min(rotary)} depends on what else is in a batch")
    return config


def _of_own_code(path: Path) -> str:
    """Return what to say of a model that transformers knows by code in its folder alone; empty where that is not so."""
    try:
        config = read_config(path)
    except ModelError:
        return ""
    model_type = config.get("model_type")
    if not config.get("auto_map") or str(model_type) in transformers.CONFIG_MAPPING:
        return ""
    return f"model_type {model_type!r} is none of its own, and code that comes with a model (auto_map) is never run"


def _rotary_types(parameters: Any) -> set[str]:
    if not isinstance(parameters, Mapping):
        return set()
    nested = [_rotary_types(value) for value in parameters.values()]
    return {str(parameters.get("rope_type", "default"))}.union(*nested)


def _probe(path: Path, config: Any, model: Any) -> TransformersConfig:
    """Run the layers without computing anything, and see how each calls attention."""
    if getattr(model, "_is_stateful", False):
        raise _refused(path, config, "it has recurrent state, which blocks of KV memory do not hold")
    context = PagedContext()
    context.install(model)
    # Experts by one batched product: the choice of experts is data, which the meta device has not.
    config._experts_implementation = model.config._experts_implementation = "batched_mm"
    ids = torch.zeros((1, _PROBE_TOKENS), dtype=torch.int64, device="meta")
    try:
        with torch.no_grad():
            output = model.base_model(input_ids=ids, position_ids=ids, use_cache=False)
    except RefusedAttentionError as error:
        raise _refused(path, config, str(error)) from None
    except NotImplementedError:
        raise _refused(path, config, _NEEDS_NUMBERS) from None
    except Exception as error:
        raise _refused(path, config, f"{_CODE_FAILS}: {_first_line(error)}") from None
    text = config.get_text_config()
    layers, num_layers = context.layers, int(text.num_hidden_layers)
    if not layers:
        raise _refused(path, config, _BYPASS)
    without = sorted(set(range(num_layers)) - layers.keys())
    if without:
        raise _refused(
            path,
            config,
            f"{len(without)} of its {num_layers} layers, the first of them number {without[0]}, keep no "
            f"keys and values of their own",
        )
    unseen = _limit_that_only_a_mask_has(model, text, layers)
    if unseen:
        raise _refused(path, config, f"{unseen} is in its mask alone, which Octavo does not make")
    shapes = {(each.num_kv_heads, each.head_dim) for each in layers.values()}
    if len(shapes) > 1:
        raise _refused(path, config, "its layers differ in their key and value heads")
    described = _describe(config, text, list(layers.values()))
    served = TransformersLM(model, described, context)
    try:
        served.logits_of(output)
    except Exception as error:
        raise _refused(path, config, f"{_CODE_FAILS}, its head apart from its layers: {_first_line(error)}") from None
    return described


def _limit_that_only_a_mask_has(model: Any, text: Any, layers: Mapping[int, LayerAttention]) -> str:
    """Return the field by which layers see less than all before them, where they do not tell attention of it."""
    types = getattr(text, "layer_types", None) or []
    if "chunked_attention" in types:
        return "attention_chunk_size"
    windowed = [index for index in layers if index < len(types) and types[index] == "sliding_attention"]
    code = sys.modules[type(model.base_model).__module__]
    if not types and getattr(text, "sliding_window", None) and hasattr(code, "create_sliding_window_causal_mask"):
        windowed = list(layers)
    return "" if all(layers[index].window for index in windowed) else "sliding_window"


def _describe(config: Any, text: Any, layers: list[LayerAttention]) -> TransformersConfig:
    windows = [layer.window for layer in layers]
    architectures = getattr(config, "architectures", None) or [type(config).__name__]
    return TransformersConfig(
        architecture=architectures[0],
        vocab_size=text.vocab_size,
        num_layers=len(layers),
        num_kv_heads=layers[0].num_kv_heads,
        head_dim=layers[0].head_dim,
        max_position_embeddings=text.max_position_embeddings,
        window=max(windows) if all(windows) else 0,
    )


def _check_runs(path: Path, model: TransformersLM, dtype: torch.dtype, device: torch.device) -> None:
    """Raise UnsupportedModelError where a sequence's output depends on how it is cut, or on others in the batch.

    That is so where a model keeps state beside keys and values, mixes neighbouring tokens, or does not turn by the
    positions that it is given.
    """
    tokens = [[5, 7, 3, 11, 2, 13], [4, 9, 6]]
    ids = [torch.tensor([token % model.config.vocab_size for token in each], device=device) for each in tokens]
    bound = _FLOAT32_BOUND if dtype == torch.float32 else _NARROW_BOUND
    first, second = ids
    try:
        with torch.inference_mode():
            alone = [_run(model, dtype, device, [[(0, each)]])[-1] for each in ids]
            together = _run(model, dtype, device, [[(0, first[:4])], [(0, first[4:]), (1, second)]])
            expected = torch.cat((alone[0][4:], alone[1]))
            logits = model.compute_logits(expected)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # whatever its code does with data, of which the meta device has none
        message = f"{path}: {model.config.architecture} cannot run: {_CODE_FAILS}: {_first_line(error)}"
        raise UnsupportedModelError(message) from None
    if logits.shape != (len(expected), model.config.vocab_size):
        raise UnsupportedModelError(f"{path}: {model.config.architecture} gives logits of shape {list(logits.shape)}")
    if not (together[-1] - expected).abs().max() <= bound * expected.abs().max():
        raise UnsupportedModelError(
            f"{path}: {model.config.architecture} cannot run: what it computes for a sequence depends on how its "
            f"tokens are spread over steps, or on the other sequences of a step"
        )


def _run(
    model: TransformersLM, dtype: torch.dtype, device: torch.device, steps: list[list[tuple[int, Tensor]]]
) -> list[Tensor]:
    """Run steps of rows, each the number of a sequence, 0 or 1, and at most 8 tokens of it in all. Return copies of the
    steps' hidden states."""
    kv_cache = KVCache.allocate(model.config, 3, 8, dtype, device)
    computed = [0, 0]
    outputs = []
    for rows in steps:
        positions = [torch.arange(computed[number], computed[number] + len(ids)) for number, ids in rows]
        for number, ids in rows:
            computed[number] += len(ids)
        lengths, contexts = [len(ids) for _, ids in rows], [computed[number] for number, _ in rows]
        metadata = AttentionMetadata(
            positions=torch.cat(positions).to(device),
            slot_mapping=torch.cat(
                [place + 8 * (number + 1) for (number, _), place in zip(rows, positions, strict=True)]
            ).to(device),
            query_start=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device),
            context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
            block_tables=torch.tensor([[number + 1] for number, _ in rows], dtype=torch.int32, device=device),
            query_lens=tuple(lengths),
            context_lens_host=tuple(contexts),
        )
        hidden = model.forward(torch.cat([ids for _, ids in rows]), metadata, kv_cache)
        outputs.append(hidden.to(torch.float32, copy=True))
    return outputs


def _refused(path: Path, config: Any, reason: str) -> UnsupportedModelError:
    name = (getattr(config, "architectures", None) or [type(config).__name__])[0]
    return UnsupportedModelError(f"{path}: {name} cannot run: {reason}")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
