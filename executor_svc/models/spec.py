"""Which tensors of a checkpoint make which parameter of a decoder, and how each splits over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from executor_svc.graph.weights import LinearWeight

Range = tuple[int, int]
"""First, and one past the last."""


class Split(Enum):
    """How a linear layer divides among the ranks of a tensor-parallel model (Shoeybi et al. 2019, "Megatron-LM")."""

    COLUMN = auto()
    """Each rank has a share of the output features, of every section the same."""
    ROW = auto()
    """Each rank has a share of the input features; their outputs are added up."""
    VOCABULARY = auto()
    """Each rank has a share of the tokens."""
    WHOLE = auto()
    """Every rank has all of it."""


@dataclass(frozen=True)
class Pairs:
    """How the rows of heads lie on disk of which the two of each pair that turns are neighbours (GPT-J's layout)."""

    head_dim: int
    rotary_dim: int
    """Rows of a head that turn, from the first on."""


@dataclass(frozen=True)
class Part:
    """Output features of a linear layer that are one tensor on disk, `NAME.weight`, and `NAME.bias` if it has one."""

    name: str
    rows: int
    transposed: bool = False
    """Whether the weight lies as [in_features, out_features] (GPT-2)."""
    interleaved_head_dim: int = 0
    """Above 0: on disk the query, key and value rows of a head lie together, head after head (GPT-NeoX). They are
    wanted as all queries, then all keys, then all values.
    """
    pairs: Pairs | None = None
    """They are wanted with the first rows of all pairs of a head before the second ones."""
    taken: tuple[Range, ...] = ()
    """The tensor's output features that the rows are, range behind range; none: all of them."""


@dataclass(frozen=True)
class LinearSpec:
    """A linear layer, its output features stacked from one or more of the checkpoint's layers."""

    parts: tuple[Part, ...]
    in_features: int
    bias: bool
    split: Split
    sections: tuple[int, ...] = ()
    """Output features that split each by themselves (queries, keys, values; gate, up); none: each part is one."""
    taken: Range | None = None
    """The tensors' input features that it has; None: all."""

    @property
    def out_features(self) -> int:
        """Of all parts."""
        return sum(part.rows for part in self.parts)

    @property
    def split_sections(self) -> tuple[int, ...]:
        """The sections, whether they are parts or lie in one."""
        return self.sections or tuple(part.rows for part in self.parts)

    def merged(self, others: Sequence[LinearWeight]) -> LinearSpec | None:
        """Return the layer whose output features are this one's and the others', in order; None where they do not take
        the same input, split otherwise or only some have a bias.
        """
        layers = (self, *(other for other in others if isinstance(other, LinearSpec)))
        alike = {(each.in_features, each.bias, each.split, each.taken) for each in layers}
        if len(layers) <= len(others) or len(alike) > 1:
            return None
        parts = tuple(part for each in layers for part in each.parts)
        return replace(self, parts=parts, sections=tuple(size for each in layers for size in each.split_sections))

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor it is made of, or of the parts of them that are taken."""
        for part in self.parts:
            shape = (self.in_features, part.rows) if part.transposed else (part.rows, self.in_features)
            yield f"{part.name}.weight", shape
            if self.bias:
                yield f"{part.name}.bias", (part.rows,)


@dataclass(frozen=True)
class NormSpec:
    """A norm: `NAME.weight`, and `NAME.bias` if it has one; neither where it has no tensors."""

    name: str
    size: int
    weight: bool = True
    bias: bool = False
    taken: Range | None = None
    """The tensors' elements that it has, where it norms together with other ranks; None: all."""
    size_of_all: int = 0
    """How many elements all these ranks have together; one that several ranks have counts for each."""

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor it is made of."""
        if self.weight:
            yield f"{self.name}.weight", (self.size,)
        if self.bias:
            yield f"{self.name}.bias", (self.size,)


@dataclass(frozen=True)
class MlpSpec:
    """`up` holds the gate too where there is one, gate first."""

    up: LinearSpec
    down: LinearSpec

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor it is made of."""
        yield from self.up.tensors()
        yield from self.down.tensors()


@dataclass(frozen=True)
class ExpertsSpec:
    """The router's output features are the experts."""

    router: LinearSpec
    experts: tuple[MlpSpec, ...]

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor it is made of."""
        yield from self.router.tensors()
        for expert in self.experts:
            yield from expert.tensors()


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer. Which norms it has follows from the config's placement and qk_norm."""

    qkv: LinearSpec
    attention_output: LinearSpec
    mlp: MlpSpec | ExpertsSpec
    attention_norm: NormSpec | None = None
    """Of what attention reads, or with Placement.AFTER_ADD of the sum that follows it."""
    mlp_norm: NormSpec | None = None
    """The same of the MLP."""
    attention_output_norm: NormSpec | None = None
    mlp_output_norm: NormSpec | None = None
    query_norm: NormSpec | None = None
    key_norm: NormSpec | None = None

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor it is made of."""
        norms = (
            self.attention_norm,
            self.mlp_norm,
            self.attention_output_norm,
            self.mlp_output_norm,
            self.query_norm,
            self.key_norm,
        )
        for norm in filter(None, norms):
            yield from norm.tensors()
        for each in (self.qkv, self.attention_output, self.mlp):
            yield from each.tensors()


@dataclass(frozen=True)
class PositionsSpec:
    """A table of learned positions, `NAME.weight`; its first `offset` rows belong to no position (OPT)."""

    name: str
    rows: int
    size: int
    offset: int = 0

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of the table."""
        yield f"{self.name}.weight", (self.rows, self.size)


@dataclass(frozen=True)
class DecoderSpec:
    """A whole decoder."""

    embedding: LinearSpec
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None
    head: LinearSpec | None
    """None: the embedding."""
    positions: PositionsSpec | None = None
    project_in: LinearSpec | None = None
    """From the embedding to the first layer."""
    project_out: LinearSpec | None = None
    """From the last norm to the head."""
    ignored: frozenset[str] = frozenset()
    """Tensors that the checkpoint holds, or may hold, and that are not needed."""

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor that the checkpoint must hold, by name."""
        shapes = dict(self.embedding.tensors())
        for layer in self.layers:
            shapes.update(layer.tensors())
        for part in (self.positions, self.project_in, self.project_out, self.final_norm, self.head):
            if part is not None:
                shapes.update(part.tensors())
        return shapes
