"""The decoder with its fusions written by hand: what the graph's passes are to come to, call for call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from executor_svc.kernels import KernelSet
from executor_svc.kernels.elementwise import AddTo
from executor_svc.kernels.linear import Linear
from executor_svc.kernels.paged_attention import PagedAttention
from executor_svc.kv_cache import KVCache
from executor_svc.layers.experts import RoutedExperts
from executor_svc.models.config import Activation, ModelConfig, NormKind, Placement
from executor_svc.models.parameters import Parameters
from executor_svc.models.spec import DecoderSpec, ExpertsSpec, LayerSpec, MlpSpec, NormSpec

Sublayer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Norm:
    """A norm of [T, hidden], alone and behind a residual add."""

    alone: Callable[[Tensor], Tensor]
    """Takes x and gives a new tensor; x is not changed."""
    add: Callable[[Tensor, Tensor], Tensor]
    """Takes x and the residual, adds x to the residual IN PLACE and gives the norm of the sum."""


def _same(x: Tensor) -> Tensor:
    return x


def no_norm(kernels: KernelSet) -> Norm:
    """Bind what stands where a layer has none: it gives x itself, and the residual itself."""
    return Norm(_same, kernels.add_to)


def rms_norm(kernels: KernelSet, weight: Tensor, eps: float) -> Norm:
    """Bind an RMSNorm."""
    return Norm(
        partial(kernels.rms_norm, weight=weight, eps=eps), partial(kernels.add_rms_norm, weight=weight, eps=eps)
    )


def layer_norm(kernels: KernelSet, weight: Tensor, bias: Tensor | None, eps: float) -> Norm:
    """Bind a LayerNorm."""
    return Norm(
        partial(kernels.layer_norm, weight=weight, bias=bias, eps=eps),
        partial(kernels.add_layer_norm, weight=weight, bias=bias, eps=eps),
    )


class Mlp:
    """down(activation(up(x))). Where it is gated, gate and up come out of one product and the activation joins them."""

    def __init__(
        self,
        up: Callable[[Tensor], Tensor],
        activation: Callable[[Tensor], Tensor],
        down: Callable[[Tensor], Tensor],
    ) -> None:
        self._up = up
        self._activation = activation
        self._down = down

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, hidden] to a new [T, hidden]."""
        return self._down(self._activation(self._up(x)))


@dataclass(frozen=True)
class AttentionStep:
    """What the attention of all layers shares in one step."""

    angles: tuple[tuple[Tensor, Tensor], ...]
    """Cosines and sines, float32 [T, rotary_dim / 2] each, under every rotary setting of the model."""
    slot_mapping: Tensor
    """int64 [T]"""
    paged_attention: PagedAttention


class SelfAttention:
    """Grouped-query attention (Ainslie et al. 2023); Q, K and V come out of one product."""

    def __init__(
        self,
        qkv: Callable[[Tensor], Tensor],
        output: Callable[[Tensor], Tensor],
        *,
        scale: float,
        angles: int,
        window: int = 0,
        soft_cap: float = 0.0,
        kernels: KernelSet,
    ) -> None:
        """`angles` is the layer's place in AttentionStep.angles. Scale, window and soft cap: see PagedAttention."""
        self._qkv = qkv
        self._output = output
        self._scale = scale
        self._angles = angles
        self._window = window
        self._soft_cap = soft_cap
        self._rotary_write_kv = kernels.rotary_write_kv

    def __call__(self, x: Tensor, step: AttentionStep, key_cache: Tensor, value_cache: Tensor) -> Tensor:
        """Map x [T, hidden] to a new [T, hidden]. Writes the keys and values of the T tokens into the caches."""
        cos, sin = step.angles[self._angles]
        query = self._rotary_write_kv(self._qkv(x), cos, sin, step.slot_mapping, key_cache, value_cache)
        attended = step.paged_attention(
            query, key_cache, value_cache, self._scale, window=self._window, soft_cap=self._soft_cap
        )
        return self._output(attended.flatten(1))


class NormedQkv:
    """The product of Q, K and V with RMSNorm on queries and keys, over each head or over all heads of a token."""

    def __init__(
        self,
        qkv: Linear,
        query_weight: Tensor,
        key_weight: Tensor,
        *,
        sizes: tuple[int, int],
        eps: float,
        kernels: KernelSet,
    ) -> None:
        """`sizes`: elements of all queries, and of all keys, of a token. A weight is as long as what is normed at
        once.
        """
        self._qkv = qkv
        self._arguments = sizes, query_weight, key_weight, eps
        self._norm = kernels.norm_query_key

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, hidden] to a new [T, (num_heads + 2 * num_kv_heads) * head_dim]."""
        return self._norm(self._qkv(x), *self._arguments)


class DecoderLayer(Protocol):
    """Attention and MLP with their norms and residual adds."""

    def __call__(
        self, x: Tensor, residual: Tensor, step: AttentionStep, key_cache: Tensor, value_cache: Tensor
    ) -> Tensor:
        """Give the next layer's x [T, hidden]. Changes the residual [T, hidden] IN PLACE."""


class SequentialLayer:
    """One sublayer after the other, each added to the residual."""

    def __init__(self, attention: SelfAttention, mlp_norm: Norm, mlp: Sublayer, next_norm: Norm) -> None:
        self._attention = attention
        self._mlp_norm = mlp_norm.add
        self._mlp = mlp
        self._next_norm = next_norm.add

    def __call__(
        self, x: Tensor, residual: Tensor, step: AttentionStep, key_cache: Tensor, value_cache: Tensor
    ) -> Tensor:
        """See DecoderLayer."""
        x = self._mlp_norm(self._attention(x, step, key_cache, value_cache), residual)
        return self._next_norm(self._mlp(x), residual)


class AfterAddLayer:
    """Each sublayer's sum with what it read is normed, and that is the residual from then on."""

    def __init__(self, attention: SelfAttention, attention_norm: Norm, mlp: Sublayer, mlp_norm: Norm) -> None:
        self._attention = attention
        self._attention_norm = attention_norm.add
        self._mlp = mlp
        self._mlp_norm = mlp_norm.add

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        step: AttentionStep,
        key_cache: Tensor,
        value_cache: Tensor,
    ) -> Tensor:
        """See DecoderLayer."""
        x = self._attention_norm(self._attention(x, step, key_cache, value_cache), x)
        return self._mlp_norm(self._mlp(x), x)


class ParallelLayer:
    """Attention and MLP side by side, added to the residual together."""

    def __init__(
        self, attention: SelfAttention, mlp_norm: Norm | None, mlp: Sublayer, add_to: AddTo, next_norm: Norm
    ) -> None:
        """`mlp_norm`: None where the MLP reads what attention reads."""
        self._attention = attention
        self._mlp_norm = None if mlp_norm is None else mlp_norm.alone
        self._mlp = mlp
        self._add_to = add_to
        self._next_norm = next_norm.add

    def __call__(
        self, x: Tensor, residual: Tensor, step: AttentionStep, key_cache: Tensor, value_cache: Tensor
    ) -> Tensor:
        """See DecoderLayer."""
        mlp = self._mlp(x if self._mlp_norm is None else self._mlp_norm(residual))
        return self._next_norm(self._add_to(self._attention(x, step, key_cache, value_cache), mlp), residual)


FinishLayer = Callable[[Norm], DecoderLayer]
"""Makes a layer, given the first norm of the next one, or the final norm."""


class DecoderBuilder:
    """Builds the pieces of one model. Several threads may build different ones at a time."""

    def __init__(self, config: ModelConfig, kernels: KernelSet, parameters: Parameters) -> None:
        self._config = config
        self._kernels = kernels
        self._parameters = parameters
        self._activation = _activation(config, kernels)

    def norm(self, spec: NormSpec | None) -> Norm:
        """Read a norm."""
        if spec is None:
            return no_norm(self._kernels)
        kind, eps = self._config.norm, self._config.norm_eps
        weight, bias = self._parameters.norm(spec, add_one=kind is NormKind.RMS_PLUS_ONE)
        if kind in (NormKind.LAYER, NormKind.LAYER_PLAIN):
            return layer_norm(self._kernels, weight, bias, eps)
        return rms_norm(self._kernels, weight, eps)

    def layer(self, index: int, spec: LayerSpec) -> tuple[Norm, FinishLayer]:
        """Read a layer; return its first norm, which ends the layer before it, and what makes it."""
        placement = self._config.placement
        attention, mlp = self._attention(index, spec), self._mlp(spec)
        attention_norm, mlp_norm = self.norm(spec.attention_norm), self.norm(spec.mlp_norm)
        match placement:
            case Placement.AFTER_ADD:
                return self.norm(None), lambda _: AfterAddLayer(attention, attention_norm, mlp, mlp_norm)
            case Placement.PARALLEL:
                return attention_norm, partial(ParallelLayer, attention, mlp_norm, mlp, self._kernels.add_to)
            case Placement.PARALLEL_SHARED:
                return attention_norm, partial(ParallelLayer, attention, None, mlp, self._kernels.add_to)
            case _:
                return attention_norm, partial(SequentialLayer, attention, mlp_norm, mlp)

    def _attention(self, index: int, spec: LayerSpec) -> SelfAttention:
        config, layer = self._config, self._config.layers[index]
        rotaries = config.rotaries
        return SelfAttention(
            self._qkv(spec),
            self._output(self._parameters.linear(spec.attention_output), spec.attention_output_norm),
            scale=layer.attention_scale,
            # What is not turned comes last.
            angles=len(rotaries) if layer.rotary is None else rotaries.index(layer.rotary),
            window=layer.window,
            soft_cap=config.attention_soft_cap,
            kernels=self._kernels,
        )

    def _qkv(self, spec: LayerSpec) -> Callable[[Tensor], Tensor]:
        qkv = self._parameters.linear(spec.qkv)
        if spec.query_norm is None or spec.key_norm is None:
            return qkv
        config = self._config
        add_one = config.norm is NormKind.RMS_PLUS_ONE
        query_weight, _ = self._parameters.norm(spec.query_norm, add_one=add_one)
        key_weight, _ = self._parameters.norm(spec.key_norm, add_one=add_one)
        sizes = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return NormedQkv(qkv, query_weight, key_weight, sizes=sizes, eps=config.norm_eps, kernels=self._kernels)

    def _mlp(self, spec: LayerSpec) -> Sublayer:
        if isinstance(spec.mlp, ExpertsSpec):
            return self._output(self._experts(spec.mlp), spec.mlp_output_norm)
        up, down = self._parameters.linear(spec.mlp.up), self._parameters.linear(spec.mlp.down)
        return Mlp(up, self._activation, self._output(down, spec.mlp_output_norm))

    def _experts(self, spec: ExpertsSpec) -> RoutedExperts:
        experts = self._config.experts
        assert experts is not None  # ModelConfig
        ups, downs = zip(*(self._expert(each) for each in spec.experts), strict=True)
        router = self._parameters.linear(spec.router)
        return RoutedExperts(
            router,
            ups,
            self._activation,
            downs,
            num_used=experts.num_used,
            normalize=experts.normalize,
            kernels=self._kernels,
        )

    def _expert(self, spec: MlpSpec) -> tuple[Linear, Linear]:
        return self._parameters.linear(spec.up), self._parameters.linear(spec.down)

    def _output(self, sublayer: Callable[[Tensor], Tensor], norm: NormSpec | None) -> Callable[[Tensor], Tensor]:
        """Return a sublayer's last step with the norm and the scale of what it gives, where the model has them."""
        scale = self._config.residual_scale
        if norm is not None:
            sublayer = _joined(sublayer, self.norm(norm).alone)
        if scale != 1.0:
            sublayer = _joined(sublayer, lambda x: self._kernels.scale(x, scale))
        return sublayer


def join_layers(layers: Sequence[tuple[Norm, FinishLayer]], final_norm: Norm) -> tuple[Norm, list[DecoderLayer]]:
    """Return the norm before the first layer, and the layers, each ending with the norm that follows it."""
    first_norms = [first for first, _ in layers] + [final_norm]
    return first_norms[0], [finish(after) for (_, finish), after in zip(layers, first_norms[1:], strict=True)]


def _joined(first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: second(first(x))


def _activation(config: ModelConfig, kernels: KernelSet) -> Callable[[Tensor], Tensor]:
    """Return the op. Raises ValueError where the sets have none."""
    tanh = config.activation is Activation.GELU_TANH
    match config.activation, config.gated:
        case Activation.SILU, True:
            return kernels.silu_and_mul
        case ((Activation.GELU | Activation.GELU_TANH), True):
            return partial(kernels.gelu_and_mul, tanh=tanh)
        case ((Activation.GELU | Activation.GELU_TANH), False):
            return partial(kernels.gelu, tanh=tanh)
        case Activation.RELU, False:
            return kernels.relu
    raise ValueError(f"no kernel set has a {'gated' if config.gated else 'plain'} {config.activation.name}")


class HandFused:
    """All that lies between a step's inputs and its last hidden states; inputs as capture_decoder has them."""

    def __init__(self, config: ModelConfig, spec: DecoderSpec, kernels: KernelSet, parameters: Parameters) -> None:
        builder = DecoderBuilder(config, kernels, parameters)
        layers = [builder.layer(index, layer) for index, layer in enumerate(spec.layers)]
        self._first_norm, self._layers = join_layers(layers, builder.norm(spec.final_norm))

    def run(self, kv_cache: KVCache, inputs: Sequence[Tensor], attention: Any) -> Tensor:
        """Compute a step."""
        residual, slot_mapping, *angles = inputs
        step = AttentionStep(tuple(zip(angles[::2], angles[1::2], strict=True)), slot_mapping, attention)
        x = self._first_norm.alone(residual)
        for layer, key_cache, value_cache in zip(self._layers, kv_cache.keys, kv_cache.values, strict=True):
            x = layer(x, residual, step, key_cache, value_cache)
        return x
