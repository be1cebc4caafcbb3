"""The part of a model that one rank of a tensor-parallel executor holds: what Split says, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from executor_svc.models.config import ModelConfig
from executor_svc.models.spec import (
    DecoderSpec,
    ExpertsSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    NormSpec,
    Part,
    Range,
    Split,
)
from executor_svc.parallel.share import Share
from executor_svc.weights import UnsupportedModelError


def shard_config(config: ModelConfig, share: Share) -> ModelConfig:
    """Return what a rank computes: its heads and inner features; vocabulary and hidden size are the whole model's.

    Raises UnsupportedModelError, with the numbers, where heads cannot be divided among the ranks.
    """
    check_divides(config, share.size)
    queries, keys = _heads(config, share)
    experts = config.experts
    if experts is not None:
        experts = replace(experts, intermediate_size=_width(share.of(experts.intermediate_size)))
    return replace(
        config,
        num_heads=_width(queries),
        num_kv_heads=_width(keys),
        intermediate_size=_width(share.of(config.intermediate_size)),
        experts=experts,
    )


def check_divides(config: ModelConfig, size: int) -> None:
    """Raise UnsupportedModelError, naming numbers that would do, where `size` ranks cannot divide a model."""
    if not _divides(config, size):
        possible = [str(count) for count in range(1, config.num_heads + 1) if _divides(config, count)]
        raise UnsupportedModelError(
            f"--tensor-parallel {size}: the {config.num_heads} attention heads, {config.num_kv_heads} KV heads and "
            f"{_narrowest(config)} inner features of {config.architecture} cannot be divided among {size} ranks; "
            f"they can among {', '.join(possible)}"
        )


def _divides(config: ModelConfig, size: int) -> bool:
    has_kv_head = config.num_kv_heads >= size
    can_repeat = config.num_heads % size == 0 and size % config.num_kv_heads == 0
    return (has_kv_head or can_repeat) and size <= min(_narrowest(config), config.vocab_size)


def _narrowest(config: ModelConfig) -> int:
    """Return the least inner size that must give every rank a feature."""
    sizes = [config.intermediate_size]
    if config.experts is not None:
        sizes.append(config.experts.intermediate_size)
    return min(sizes)


def shard_spec(spec: DecoderSpec, config: ModelConfig, share: Share) -> DecoderSpec:
    """Return which parts of a model's tensors a rank reads. `spec` and `config` are the whole model's."""
    return _Shard(config, share).decoder(spec)


class _Shard:
    def __init__(self, config: ModelConfig, share: Share) -> None:
        self._share = share
        self._heads, keys = _heads(config, share)
        self._queries = _times(self._heads, config.head_dim)
        self._keys = _times(keys, config.head_dim)
        self._head_dim = config.head_dim
        # All ranks together; a KV head counts for each rank that has it.
        self._num_queries, self._num_keys = config.num_heads, max(config.num_kv_heads, share.size)

    def decoder(self, spec: DecoderSpec) -> DecoderSpec:
        head = None if spec.head is None else self._vocabulary(spec.head)
        return replace(
            spec, embedding=self._vocabulary(spec.embedding), layers=tuple(map(self._layer, spec.layers)), head=head
        )

    def _layer(self, spec: LayerSpec) -> LayerSpec:
        sections = (self._queries, self._keys, self._keys)
        mlp = self._experts(spec.mlp) if isinstance(spec.mlp, ExpertsSpec) else self._mlp(spec.mlp)
        return replace(
            spec,
            qkv=self._columns(spec.qkv, sections),
            attention_output=self._rows(spec.attention_output, self._queries),
            mlp=mlp,
            query_norm=self._head_norm(spec.query_norm, self._queries, self._num_queries),
            key_norm=self._head_norm(spec.key_norm, self._keys, self._num_keys),
        )

    def _mlp(self, spec: MlpSpec) -> MlpSpec:
        inner = self._share.of(spec.down.in_features)
        return MlpSpec(self._columns(spec.up, [inner] * len(spec.up.split_sections)), self._rows(spec.down, inner))

    def _experts(self, spec: ExpertsSpec) -> ExpertsSpec:
        return replace(spec, experts=tuple(map(self._mlp, spec.experts)))

    def _head_norm(self, spec: NormSpec | None, taken: Range, num_heads: int) -> NormSpec | None:
        """Divide the norm of all heads together; that of each head is the same for all."""
        if spec is None or spec.size == self._head_dim:
            return spec
        return replace(spec, size=_width(taken), taken=taken, size_of_all=num_heads * self._head_dim)

    def _vocabulary(self, spec: LinearSpec) -> LinearSpec:
        assert spec.split is Split.VOCABULARY  # naming
        return self._columns(spec, [self._share.of(spec.out_features)])

    def _columns(self, spec: LinearSpec, ranges: Sequence[Range]) -> LinearSpec:
        """Take some output features of each section."""
        sizes = spec.split_sections
        if len(spec.parts) == len(sizes):
            parts = tuple(_taking(part, [taken]) for part, taken in zip(spec.parts, ranges, strict=True))
        else:
            (part,) = spec.parts
            if part.interleaved_head_dim:
                parts = (_taking(part, [_times(self._heads, 3 * part.interleaved_head_dim)]),)
            else:
                starts = accumulate(sizes, initial=0)
                moved = [(start + first, start + last) for start, (first, last) in zip(starts, ranges, strict=False)]
                parts = (_taking(part, moved),)
        return replace(spec, parts=parts, sections=tuple(map(_width, ranges)))

    def _rows(self, spec: LinearSpec, taken: Range) -> LinearSpec:
        """Take some input features. The bias is added once, by rank 0."""
        return replace(spec, in_features=_width(taken), taken=taken, bias=spec.bias and self._share.rank == 0)


def _heads(config: ModelConfig, share: Share) -> tuple[Range, Range]:
    """Return a rank's query heads and KV heads: some KV heads, with all that read them, and one rank may have one more
    than another; where there are fewer than ranks, an even part of the query heads and the KV head that these read.
    """
    count = config.num_kv_heads
    if count >= share.size:
        keys = share.of(count)
        return _times(keys, config.num_heads // count), keys
    first = share.rank * count // share.size
    return share.of(config.num_heads), (first, first + 1)


def _taking(part: Part, ranges: Sequence[Range]) -> Part:
    return replace(part, rows=sum(map(_width, ranges)), taken=tuple(ranges))


def _times(taken: Range, size: int) -> Range:
    return taken[0] * size, taken[1] * size


def _width(taken: Range) -> int:
    return taken[1] - taken[0]
