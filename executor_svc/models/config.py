"""The declarative description of a decoder: everything the code asks about a model, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from executor_svc.layers.rotary import RotaryConfig


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of RMSNorm, rotary grouped-query attention and SiLU-gated MLP, each behind a residual connection."""

    architecture: str
    """The name in config.json."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    """Longest sequence, in tokens."""
    rotary: RotaryConfig
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias on attention's output projection."""
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    """The head is the embedding."""

    def __post_init__(self) -> None:
        """Raise ValueError, naming the field, where the numbers make no decoder."""
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}: rotary positions need an even one")
        if self.rotary.head_dim != self.head_dim:
            raise ValueError(f"rotary head_dim {self.rotary.head_dim} is not head_dim {self.head_dim}")
