"""A decoder as it is described, op by op: what is captured, and then fused by passes.

Every projection of the checkpoint is a product of its own, every norm, sum and activation an op. Tensors that a
checkpoint has merged stay so: their products are split by columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from executor_svc.graph import ops
from executor_svc.graph.capture import Capture
from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.passes.rotary_write_kv import NO_COS, NO_SIN
from executor_svc.models.config import Activation, LayerConfig, ModelConfig, NormKind, Placement
from executor_svc.models.spec import DecoderSpec, ExpertsSpec, LayerSpec, LinearSpec, MlpSpec, NormSpec, Split


@dataclass(frozen=True)
class NormTensor:
    """A parameter: the weight of a norm, or its bias."""

    spec: NormSpec
    is_bias: bool = False


@dataclass(frozen=True)
class RankSum:
    """A parameter: what adds something up over the ranks, in place."""


@dataclass(frozen=True)
class RankNorm:
    """A parameter: the RMSNorm, in place, of something whose columns the ranks divide."""

    spec: NormSpec
    """Of this rank's columns."""


def capture_decoder(config: ModelConfig, spec: DecoderSpec, *, is_shared: bool = False) -> ModelGraph:
    """Capture all that lies between a step's inputs and its last hidden states. `is_shared`: config and spec are one
    rank's, and what layers write is added up over all of them.

    Inputs: `hidden`, the embedded tokens, which is overwritten; slot_mapping; cosines and sines of each rotary setting,
    empty ones last where a layer turns nothing; `plan`, a PagedAttention; all layers' key caches, then their value
    caches. Parameters: LinearSpec, NormTensor, ExpertsSpec, RankSum and RankNorm, by the names of the checkpoint.
    """
    return _Plain(config, spec, is_shared).graph()


class _Plain:
    def __init__(self, config: ModelConfig, spec: DecoderSpec, is_shared: bool) -> None:
        self._config = config
        self._is_shared = is_shared
        self._spec = spec
        self._capture = capture = Capture()
        self._hidden = capture.input("hidden", (config.hidden_size,), is_owned=True)
        self._slots = capture.input("slot_mapping")
        self._angles = [
            (capture.input(f"cos_{index}", (half,)), capture.input(f"sin_{index}", (half,)))
            for index, half in enumerate(rotary.rotary_dim // 2 for rotary in config.rotaries)
        ]
        if any(layer.rotary is None for layer in config.layers):
            capture.input(NO_COS, (0,))
            capture.input(NO_SIN, (0,))
        self._plan = capture.input("plan")
        cache = (config.num_kv_heads, config.head_dim)
        self._caches = [
            [capture.input(f"{kind}_cache_{index}", cache) for index in range(config.num_layers)]
            for kind in ("key", "value")
        ]

    def graph(self) -> ModelGraph:
        hidden = self._hidden
        for index, layer in enumerate(self._spec.layers):
            hidden = self._layer(index, layer, hidden)
        return self._capture.finish(self._norm(self._spec.final_norm, hidden))

    def _layer(self, index: int, spec: LayerSpec, hidden: Any) -> Any:
        config, placement = self._config.layers[index], self._config.placement
        if placement is Placement.AFTER_ADD:
            attended = ops.add(self._attention(index, config, spec, hidden), hidden)
            hidden = self._norm(spec.attention_norm, attended)
            return self._norm(spec.mlp_norm, ops.add(self._mlp(spec, hidden), hidden))
        x = self._norm(spec.attention_norm, hidden)
        if placement in (Placement.PARALLEL, Placement.PARALLEL_SHARED):
            y = x if placement is Placement.PARALLEL_SHARED else self._norm(spec.mlp_norm, hidden)
            mlp = self._mlp(spec, y)
            return ops.add(ops.add(self._attention(index, config, spec, x), mlp), hidden)
        hidden = ops.add(self._attention(index, config, spec, x), hidden)
        return ops.add(self._mlp(spec, self._norm(spec.mlp_norm, hidden)), hidden)

    def _attention(self, index: int, config: LayerConfig, spec: LayerSpec, x: Any) -> Any:
        size = self._config.head_dim
        query, key, value = self._sections(spec.qkv, x)
        query, key = self._head_norm(spec.query_norm, query), self._head_norm(spec.key_norm, key)
        value = ops.heads(value, size)
        if config.rotary is not None:
            angles = self._angles[self._config.rotaries.index(config.rotary)]
            query, key = ops.rotary(query, *angles), ops.rotary(key, *angles)
        caches = [kind[index] for kind in self._caches]
        ops.write_kv(key, value, self._slots, *caches)
        settings = (config.attention_scale, config.window, self._config.attention_soft_cap)
        attended = ops.attention(self._plan, query, *caches, *settings)
        return self._output(self._linear(spec.attention_output, ops.flat(attended)), spec.attention_output_norm)

    def _head_norm(self, spec: NormSpec | None, x: Any) -> Any:
        """Split x into heads, normed each or all together where the model does."""
        size = self._config.head_dim
        if spec is None:
            return ops.heads(x, size)
        if spec.taken is not None:
            norm = self._capture.parameter(f"{spec.name} over ranks", RankNorm(spec))
            return ops.heads(ops.over_ranks(x, norm), size)
        if spec.size == size:
            return self._norm(spec, ops.heads(x, size))
        return ops.heads(self._norm(spec, x), size)

    def _mlp(self, spec: LayerSpec, x: Any) -> Any:
        if isinstance(spec.mlp, ExpertsSpec):
            name = f"{spec.mlp.router.parts[0].name} and its experts"
            result = self._summed(ops.experts(x, self._capture.parameter(name, spec.mlp)))
        else:
            result = self._linear(spec.mlp.down, self._activated(spec.mlp, x))
        return self._output(result, spec.mlp_output_norm)

    def _activated(self, spec: MlpSpec, x: Any) -> Any:
        if not self._config.gated:
            return self._activation(self._linear(spec.up, x))
        gate, up = self._sections(spec.up, x)
        return ops.multiply(self._activation(gate), up)

    def _activation(self, x: Any) -> Any:
        match self._config.activation:
            case Activation.SILU:
                return ops.silu(x)
            case Activation.RELU:
                return ops.relu(x)
            case Activation.RELU_SQUARED:
                positive = ops.relu(x)
                return ops.multiply(positive, positive)
            case _:
                return ops.gelu(x, self._config.activation is Activation.GELU_TANH)

    def _output(self, x: Any, norm: NormSpec | None) -> Any:
        """Norm and scale what a sublayer gives, where the model does."""
        x = self._norm(norm, x)
        factor = self._config.residual_scale
        return x if factor == 1.0 else ops.scale(x, factor)

    def _sections(self, spec: LinearSpec, x: Any) -> list[Any]:
        """Give the sections of a stacked layer: products of its parts, or columns where one part holds them all."""
        if len(spec.parts) == len(spec.split_sections):
            return [self._linear(part, x) for part in _parts(spec)]
        product, start, sections = self._linear(spec, x), 0, []
        for size in spec.split_sections:
            sections.append(ops.columns(product, start, start + size))
            start += size
        return sections

    def _linear(self, spec: LinearSpec, x: Any) -> Any:
        name = "+".join(part.name for part in spec.parts)
        product = ops.linear(x, self._capture.parameter(f"{name}.weight", spec))
        return self._summed(product) if spec.split is Split.ROW else product

    def _summed(self, x: Any) -> Any:
        return ops.over_ranks(x, self._capture.parameter("sum over ranks", RankSum())) if self._is_shared else x

    def _norm(self, spec: NormSpec | None, x: Any) -> Any:
        if spec is None:
            return x
        config = self._config
        weight = self._capture.parameter(f"{spec.name}.weight", NormTensor(spec))
        if config.norm in (NormKind.RMS, NormKind.RMS_PLUS_ONE):
            return ops.rms_norm(x, weight, config.norm_eps)
        bias = self._capture.parameter(f"{spec.name}.bias", NormTensor(spec, is_bias=True)) if spec.bias else None
        return ops.layer_norm(x, weight, bias, config.norm_eps)


def _parts(spec: LinearSpec) -> Iterator[LinearSpec]:
    """Yield a stacked layer's parts as layers of their own."""
    for part in spec.parts:
        yield replace(spec, parts=(part,), sections=(part.rows,))
