"""The layers of a model of transformers as a graph: exported by torch, translated, fused and compiled."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from executor_svc.attention import AttentionMetadata
from executor_svc.graph.compiled import CompiledGraph
from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.optimize import optimize
from executor_svc.graph.passes.base import Pass
from executor_svc.graph.tensors import TensorLinear, pack
from executor_svc.graph.translate import NotTranslatableError, Translated, translate
from executor_svc.kernels import KernelSet
from executor_svc.kernels.paged_attention import PagedAttention
from executor_svc.kernels.record import StepBody
from executor_svc.kv_cache import KVCache, KVShape
from executor_svc.models.paged_interface import ExportContext

logger = logging.getLogger(__name__)

_MOST_TOKENS = 1 << 20
"""Of a step, as far as the export needs a bound."""


class _Base(nn.Module):
    """The layers, called as a step calls them."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        return self.base(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state


class GraphLayers:
    """What lies between token ids and last hidden states, compiled. Weights are those of the model, packed."""

    def __init__(
        self,
        exported: fx.Graph,
        tensors: dict[str, Tensor],
        translated: Translated,
        layers: CompiledGraph,
        kernels: KernelSet,
        replaced: Sequence[Tensor],
    ) -> None:
        self.layers = layers
        self.replaced = replaced
        """Weights of the model that are packed here."""
        self._prologue, self._arguments = _prologue(exported, tensors, translated)
        self._kernels = kernels
        self._kv_cache: KVCache | None = None
        self._body: StepBody

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, kv_cache: KVCache) -> Tensor:
        """Give the last hidden states, after the final norm: [T, hidden], until the next call. See CausalLM."""
        if kv_cache is not self._kv_cache:
            self._kv_cache = kv_cache
            self._body = self._kernels.record(partial(self._run, kv_cache))
        hidden, *angles = self._prologue(*self._arguments, token_ids[None], metadata.positions[None])
        inputs = [hidden[0].contiguous(), metadata.slot_mapping]
        inputs.extend(angle[0, :, : angle.shape[-1] // 2].float().contiguous() for angle in angles)
        none = torch.empty((len(token_ids), 0), device=token_ids.device)
        inputs.extend((none, none))
        return self._body(inputs, self._kernels.plan_attention(metadata, kv_cache.block_size))

    def _run(self, kv_cache: KVCache, inputs: Sequence[Tensor], attention: PagedAttention) -> Tensor:
        hidden: Tensor = self.layers(*inputs, attention, *kv_cache.keys, *kv_cache.values)
        return hidden


def capture_layers(model: Any, config: KVShape) -> tuple[fx.Graph, dict[str, Tensor], Translated]:
    """Export and translate a model's layers, which are on any device, meta too. Returns the exported graph, its
    parameters by placeholder, and the translation. Raises NotTranslatableError.
    """
    context = ExportContext()
    context.install(model)
    device = next(model.parameters()).device
    ids = torch.zeros((1, 7), dtype=torch.int64, device=device)
    tokens = torch.export.Dim("tokens", min=2, max=_MOST_TOKENS)
    try:
        with torch.no_grad():
            exported = torch.export.export(
                _Base(model.base_model).eval(),
                (ids, torch.arange(7, device=device)[None]),
                dynamic_shapes={"ids": {1: tokens}, "positions": {1: tokens}},
                strict=False,
            )
    except Exception as error:  # whatever its code leads torch.export to
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise NotTranslatableError(f"torch.export does not take it: {reason}") from None
    held = {**exported.state_dict, **exported.constants}
    names = {**exported.graph_signature.inputs_to_parameters, **exported.graph_signature.inputs_to_buffers}
    tensors = {place: held[name] for place, name in names.items()}
    cache = (config.num_kv_heads, config.head_dim)
    return exported.graph, tensors, translate(exported.graph, tensors, context.op, cache, config.num_layers)


def compile_layers(model: Any, config: KVShape, kernels: KernelSet, passes: Sequence[Pass]) -> GraphLayers | None:
    """Return a model's layers as a compiled graph; None where they cannot be one, which the log tells.

    The model's own linear layers stay as they are: see `release`.
    """
    try:
        exported, tensors, translated = capture_layers(model, config)
    except NotTranslatableError as error:
        logger.info("the model's layers run as its own code has them", extra={"fields": {"reason": str(error)}})
        return None
    replaced = linears_of(translated.graph)
    runs = optimize(translated.graph, passes)
    logger.info("graph optimized", extra={"fields": {run.name: run.matches for run in runs if run.matches}})
    parameters = pack(translated.graph.parameters, kernels)
    layers = CompiledGraph(translated.graph, kernels, parameters)
    return GraphLayers(exported, tensors, translated, layers, kernels, replaced)


def release(model: nn.Module, replaced: Sequence[Tensor]) -> None:
    """Give back weights that a graph has packed: the model's own code cannot run its layers afterwards."""
    taken = {each.data_ptr() for each in replaced}
    for parameter in model.parameters():
        if parameter.data_ptr() in taken:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


def linears_of(graph: ModelGraph) -> list[Tensor]:
    """Return the weights of a graph's linear layers, as the model has them."""
    return [value.weight for value in graph.parameters.values() if isinstance(value, TensorLinear)]


def capture_described(path: Path) -> tuple[str, ModelGraph]:
    """Return the architecture and the plain graph of a folder's model; no weight is read. Raises UnsupportedModelError
    where it has none.
    """
    from executor_svc.models.transformers_lm import describe_on_meta
    from executor_svc.weights import UnsupportedModelError

    config, model = describe_on_meta(path)
    try:
        return config.architecture, capture_layers(model, config)[2].graph
    except NotTranslatableError as error:
        raise UnsupportedModelError(f"{path}: {config.architecture} runs as its own code has it: {error}") from None


def _prologue(
    exported: fx.Graph, tensors: dict[str, Tensor], translated: Translated
) -> tuple[fx.GraphModule, list[Tensor]]:
    """Return a function of some parameters, ids and positions that gives a graph's inputs, and the parameters."""
    wanted = [translated.hidden, *(node for pair in translated.angles for node in pair)]
    needed: set[fx.Node] = set()
    todo = list(wanted)
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo += node.all_input_nodes
    graph, arguments = fx.Graph(), []
    copies: dict[fx.Node, fx.Node] = {}
    for node in exported.nodes:
        is_given = node.op == "placeholder" and node.name not in tensors
        if node in needed or is_given:
            copies[node] = graph.node_copy(node, lambda each: copies[each])
            if node.op == "placeholder" and not is_given:
                arguments.append(tensors[node.name].detach())
    graph.output(tuple(copies[each] for each in wanted))
    return fx.GraphModule(nn.Module(), graph), arguments
