"""From the description of a decoder and its parameters to what runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from executor_svc.kernels import KernelSet
from executor_svc.kernels.linear import Linear
from executor_svc.layers import norm as norms
from executor_svc.layers.attention import NormedQkv, SelfAttention
from executor_svc.layers.experts import RoutedExperts
from executor_svc.layers.mlp import Mlp
from executor_svc.layers.norm import Norm
from executor_svc.models.config import Activation, ModelConfig, NormKind, Placement
from executor_svc.models.decoder import (
    AfterAddLayer,
    DecoderLayer,
    Ends,
    ParallelLayer,
    SequentialLayer,
    Sublayer,
)
from executor_svc.models.parameters import Parameters
from executor_svc.models.spec import DecoderSpec, ExpertsSpec, LayerSpec, LinearSpec, MlpSpec, NormSpec

FinishLayer = Callable[[Norm], DecoderLayer]
"""Makes a layer, given the first norm of the next one, or the final norm."""


class DecoderBuilder:
    """Builds the pieces of one model. Several threads may build different ones at a time."""

    def __init__(self, config: ModelConfig, kernels: KernelSet, parameters: Parameters) -> None:
        self._config = config
        self._kernels = kernels
        self._parameters = parameters
        self._activation = _activation(config, kernels)

    def embedding_and_head(self, spec: DecoderSpec) -> tuple[Linear, Linear]:
        """Read both; they are one where the spec has no head."""
        embedding = self._parameters.linear(spec.embedding)
        return embedding, embedding if spec.head is None else self._parameters.linear(spec.head)

    def ends(self, spec: DecoderSpec, embedding: Linear, head: Linear, first_norm: Norm) -> Ends:
        """Read what else stands before the first layer and after the last one."""
        return Ends(
            embedding=embedding,
            head=head,
            first_norm=first_norm,
            positions=None if spec.positions is None else self._parameters.table(spec.positions),
            project_in=self._optional_linear(spec.project_in),
            project_out=self._optional_linear(spec.project_out),
        )

    def norm(self, spec: NormSpec | None) -> Norm:
        """Read a norm."""
        if spec is None:
            return norms.no_norm(self._kernels)
        kind, eps = self._config.norm, self._config.norm_eps
        weight, bias = self._parameters.norm(spec, add_one=kind is NormKind.RMS_PLUS_ONE)
        if kind in (NormKind.LAYER, NormKind.LAYER_PLAIN):
            return norms.layer_norm(self._kernels, weight, bias, eps)
        return norms.rms_norm(self._kernels, weight, eps)

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
            router, ups, self._activation, downs, num_used=experts.num_used, normalize=experts.normalize
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

    def _optional_linear(self, spec: LinearSpec | None) -> Linear | None:
        return None if spec is None else self._parameters.linear(spec)


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
