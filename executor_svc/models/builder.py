"""From what a graph's parameters are described by to what its ops take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from torch import Tensor

from executor_svc.kernels import KernelSet
from executor_svc.kernels.linear import Linear
from executor_svc.layers.experts import RoutedExperts
from executor_svc.models.config import Activation, ModelConfig, NormKind
from executor_svc.models.decoder import Ends
from executor_svc.models.parameters import Parameters
from executor_svc.models.plain import NormTensor, RankNorm, RankSum
from executor_svc.models.spec import DecoderSpec, ExpertsSpec, LinearSpec, MlpSpec, NormSpec
from executor_svc.parallel.norm import rank_norm
from executor_svc.parallel.ranks import Ranks

_PLUS_ONE = (NormKind.RMS_PLUS_ONE, NormKind.LAYER_PLUS_ONE)


class DecoderBuilder:
    """Loads the parameters of one model. Several threads may load different ones at a time."""

    def __init__(
        self, config: ModelConfig, kernels: KernelSet, parameters: Parameters, ranks: Ranks | None = None
    ) -> None:
        """`config`: with ranks, this one's."""
        self._config = config
        self._kernels = kernels
        self._ranks = ranks
        self._activation = gated_activation(config, kernels) if config.experts is not None else None
        self._parameters = parameters

    def embedding_and_head(self, spec: DecoderSpec) -> tuple[Linear, Linear]:
        """Read both; they are one where the spec has no head."""
        embedding = self._parameters.linear(spec.embedding)
        return embedding, embedding if spec.head is None else self._parameters.linear(spec.head)

    def ends(self, spec: DecoderSpec, embedding: Linear, head: Linear) -> Ends:
        """Read what else stands before the first layer and after the last one."""
        return Ends(
            embedding=embedding,
            head=head,
            positions=None if spec.positions is None else self._parameters.table(spec.positions),
            project_in=self._optional_linear(spec.project_in),
            project_out=self._optional_linear(spec.project_out),
        )

    def submit(self, pool: Executor, described: Mapping[str, Any]) -> dict[str, Future[Any]]:
        """Have a pool load what a graph's parameters are described by. A norm with a bias is read once."""
        norms = {each.spec: pool.submit(self._norm, each.spec) for each in _norms(described.values())}
        return {
            name: norms[each.spec] if isinstance(each, NormTensor) else pool.submit(self._load, each)
            for name, each in described.items()
        }

    def _load(self, described: LinearSpec | ExpertsSpec | RankSum | RankNorm) -> Any:
        match described:
            case ExpertsSpec():
                return self._experts(described)
            case LinearSpec():
                return self._parameters.linear(described)
        assert self._ranks is not None  # capture_decoder
        if isinstance(described, RankSum):
            return self._kernels.on_host(self._ranks.sum)
        weight, _ = self._norm(described.spec)
        size_of_all, eps = described.spec.size_of_all, self._config.norm_eps
        return self._kernels.on_host(partial(rank_norm, self._ranks, weight, size_of_all, eps))

    def _norm(self, spec: NormSpec) -> tuple[Tensor, Tensor | None]:
        return self._parameters.norm(spec, add_one=self._config.norm in _PLUS_ONE)

    def _experts(self, spec: ExpertsSpec) -> RoutedExperts:
        experts = self._config.experts
        assert experts is not None  # ModelConfig
        assert self._activation is not None  # the same
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

    def _optional_linear(self, spec: LinearSpec | None) -> Linear | None:
        return None if spec is None else self._parameters.linear(spec)


def results(described: Mapping[str, Any], loaded: Mapping[str, Future[Any]]) -> dict[str, Any]:
    """Wait for what `submit` loads, and return it by name. Raises what went wrong first, in the order of the graph."""
    found = {name: each.result() for name, each in loaded.items()}
    return {
        name: found[name][each.is_bias] if isinstance(each, NormTensor) else found[name]
        for name, each in described.items()
    }


def _norms(described: Iterable[Any]) -> list[NormTensor]:
    return [each for each in described if isinstance(each, NormTensor) and not each.is_bias]


def gated_activation(config: ModelConfig, kernels: KernelSet) -> Callable[[Tensor], Tensor]:
    """Return the op that joins gate and up of an expert. Raises ValueError where the sets have none."""
    match config.activation:
        case Activation.SILU:
            return kernels.silu_and_mul
        case Activation.GELU | Activation.GELU_TANH:
            return partial(kernels.gelu_and_mul, tanh=config.activation is Activation.GELU_TANH)
    raise ValueError(f"no kernel set has a gated {config.activation.name}")
