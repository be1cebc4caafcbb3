"""Which tensors of a checkpoint make which parameter of a decoder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class LinearSpec:
    """A linear layer, its output features stacked from one or more of the checkpoint's layers."""

    parts: tuple[tuple[str, int], ...]
    """Name without `.weight`, and output features, of each."""
    in_features: int
    bias: bool

    @property
    def out_features(self) -> int:
        """Of all parts."""
        return sum(rows for _, rows in self.parts)

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor it is made of."""
        for name, rows in self.parts:
            yield f"{name}.weight", (rows, self.in_features)
            if self.bias:
                yield f"{name}.bias", (rows,)


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer. Norms are named without `.weight`."""

    input_norm: str
    qkv: LinearSpec
    attention_output: LinearSpec
    post_attention_norm: str
    gate_up: LinearSpec
    down: LinearSpec


@dataclass(frozen=True)
class DecoderSpec:
    """A whole decoder."""

    vocab_size: int
    hidden_size: int
    embedding: str
    layers: tuple[LayerSpec, ...]
    final_norm: str
    head: LinearSpec | None
    """None: the embedding."""
    ignored: frozenset[str] = frozenset()
    """Tensors that a checkpoint may hold and that are not needed."""

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor that the checkpoint must hold, by name."""
        shapes: dict[str, tuple[int, ...]] = {f"{self.embedding}.weight": (self.vocab_size, self.hidden_size)}
        for layer in self.layers:
            for norm in (layer.input_norm, layer.post_attention_norm):
                shapes[f"{norm}.weight"] = (self.hidden_size,)
            for linear in (layer.qkv, layer.attention_output, layer.gate_up, layer.down):
                shapes.update(linear.tensors())
        shapes[f"{self.final_norm}.weight"] = (self.hidden_size,)
        if self.head is not None:
            shapes.update(self.head.tensors())
        return shapes
