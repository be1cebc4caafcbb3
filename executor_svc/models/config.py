"""The declarative description of a decoder: everything the code asks about a model, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from executor_svc.kv_cache import KVShape
from executor_svc.layers.rotary import RotaryConfig


class ServedConfig(KVShape, Protocol):
    """What serving asks of a model, whoever computes it. See ModelConfig."""

    @property
    def architecture(self) -> str:
        """The name in config.json."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    @property
    def max_position_embeddings(self) -> int:
        """Longest sequence, in tokens."""

    @property
    def unstretched_length(self) -> int:
        """The longest sequence that is computed as it would be if none were longer."""

    @property
    def window(self) -> int:
        """The widest window of any layer; 0 where a layer reads all."""


class NormKind(Enum):
    """How a norm is computed, and what its tensors mean."""

    RMS = auto()
    RMS_PLUS_ONE = auto()
    """RMSNorm whose weight on disk is what is added to 1 (Gemma)."""
    LAYER = auto()
    """LayerNorm with a bias."""
    LAYER_NO_BIAS = auto()
    """LayerNorm with a weight alone (Command R)."""
    LAYER_PLUS_ONE = auto()
    """LayerNorm with a bias, whose weight on disk is what is added to 1 (Nemotron)."""
    LAYER_PLAIN = auto()
    """LayerNorm without weight and bias (Galactica)."""


class Placement(Enum):
    """Where the norms of a layer stand. A sublayer is attention or MLP; a residual add follows it."""

    BEFORE = auto()
    """Before each sublayer (Llama, GPT-2)."""
    AFTER = auto()
    """On each sublayer's output, before it is added (OLMo 2)."""
    AROUND = auto()
    """Both of these (Gemma 2 and 3)."""
    AFTER_ADD = auto()
    """On the sum, which the next sublayer reads and adds to (OPT-350m; the first transformer)."""
    PARALLEL = auto()
    """Attention and MLP read one residual, each through a norm of its own, and are added together (GPT-NeoX)."""
    PARALLEL_SHARED = auto()
    """The same with one norm for both."""


class QkNorm(Enum):
    """RMSNorm of queries and keys, before they are turned."""

    NONE = auto()
    HEAD = auto()
    """Over each head (Qwen 3, Gemma 3)."""
    ALL = auto()
    """Over all heads of a token together (OLMo 2)."""


class Activation(Enum):
    """Between the two halves of an MLP."""

    SILU = auto()
    GELU = auto()
    GELU_TANH = auto()
    RELU = auto()
    RELU_SQUARED = auto()
    """So et al. 2021, "Primer"."""


@dataclass(frozen=True)
class LayerConfig:
    """What can differ from layer to layer."""

    attention_scale: float
    """Scores are multiplied by it."""
    rotary: RotaryConfig | None
    """None: queries and keys are not turned."""
    window: int = 0
    """Tokens that a query sees, itself included; 0: all before it."""
    routed: bool = False
    """Whether the MLP is one of experts."""


MOST_EXPERTS = 1024
"""Of a layer. No model has as many."""


@dataclass(frozen=True)
class ExpertsConfig:
    """A layer of experts, gated MLPs each: every token goes through the `num_used` that its router scores highest."""

    num_experts: int
    num_used: int
    intermediate_size: int
    normalize: bool
    """Whether the weights of the experts used are made to sum to 1."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer. Defaults are Llama's."""

    architecture: str
    """The name in config.json."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """Longest sequence, in tokens."""
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    norm: NormKind = NormKind.RMS
    placement: Placement = Placement.BEFORE
    qk_norm: QkNorm = QkNorm.NONE
    activation: Activation = Activation.SILU
    gated: bool = True
    """Whether the MLP is down(act(gate(x)) * up(x)), or else down(act(up(x)))."""
    experts: ExpertsConfig | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias on attention's output projection."""
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    """The head is the embedding."""
    final_norm: bool = True
    learned_positions: int = 0
    """Rows of a table of positions that is added to the embedding, from position 0 on; 0: there is none."""
    embedding_size: int | None = None
    """Where embedding and head are narrower than the layers, joined to them by a projection at either end (OPT)."""
    attention_soft_cap: float = 0.0
    """Scores are held below it by tanh; 0: they are not."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """What each sublayer gives is multiplied by it before it is added."""
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0
    """Logits are held below it by tanh, after their scale; 0: they are not."""

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
        if self.norm_eps < 0:
            raise ValueError(f"the epsilon of the norms is {self.norm_eps}: it must be at least 0")
        if self.embedding_size is not None and self.embedding_size < 1:
            raise ValueError(f"the embedding's size is {self.embedding_size}: it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        for rotary in self.rotaries:
            if rotary.rotary_dim % 2 or not 0 < rotary.rotary_dim <= self.head_dim:
                raise ValueError(
                    f"head_dim is {self.head_dim} and {rotary.rotary_dim} of it turn with the position: that must be "
                    f"even, and at least 2"
                )
        for layer in self.layers:
            if layer.window < 0:
                raise ValueError(f"sliding_window is {layer.window}: it must be at least 1")
            if layer.routed and self.experts is None:
                raise ValueError("a layer of experts without experts")
        if self.experts is not None and not 0 < self.experts.num_used <= self.experts.num_experts <= MOST_EXPERTS:
            raise ValueError(f"{self.experts.num_used} of {self.experts.num_experts} experts are used by a token")
        if self.experts is not None and self.experts.intermediate_size < 1:
            raise ValueError(f"the experts' inner size is {self.experts.intermediate_size}: it must be at least 1")

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def rotaries(self) -> tuple[RotaryConfig, ...]:
        """The different rotary settings of the layers, in the order in which they come."""
        return tuple(dict.fromkeys(layer.rotary for layer in self.layers if layer.rotary is not None))

    @property
    def window(self) -> int:
        """The widest window of any layer: no layer reads what is that many tokens back. 0 where a layer reads all."""
        windows = [layer.window for layer in self.layers]
        return max(windows) if all(windows) else 0

    @property
    def unstretched_length(self) -> int:
        """The longest sequence that is computed as it would be if none were longer, at most max_position_embeddings.

        Longrope turns by other angles where longer sequences are to fit.
        """
        lengths = [rotary.unstretched_length for rotary in self.rotaries]
        return min([self.max_position_embeddings, *(length for length in lengths if length)])
