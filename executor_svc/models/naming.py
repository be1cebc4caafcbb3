"""How checkpoints name their tensors: Llama's names, and what other families have instead."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from executor_svc.models.config import ModelConfig, NormKind, Placement, QkNorm
from executor_svc.models.spec import (
    DecoderSpec,
    ExpertsSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    NormSpec,
    Pairs,
    Part,
    PositionsSpec,
    Split,
)

_BEFORE = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_AFTER = {"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"}
_LLAMA_NORMS = {
    Placement.BEFORE: _BEFORE,
    Placement.PARALLEL: _BEFORE,
    Placement.AFTER: _AFTER,
    Placement.AROUND: {**_AFTER, "attention_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"},
}


@dataclass(frozen=True)
class ExpertNames:
    """Inside a layer; gate, up and down inside an expert."""

    router: str
    experts: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class Names:
    """Names without `.weight`, Llama's unless told otherwise. Those of a layer's tensors are inside the layer."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    """What the layers' numbers follow."""
    final_norm: str = "model.norm"
    head: str = "lm_head"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Three tensors, or one with all of it."""
    qkv_interleaved: bool = False
    """Whether Q, K and V of a head lie together, head after head."""
    pairs_adjoin: bool = False
    """Whether the two rows of a pair that turns lie side by side in Q and K, and not half of what turns apart."""
    attention_output: str = "self_attn.o_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Gate and up, or one tensor: both of them, or up where there is no gate."""
    down: str = "mlp.down_proj"
    norms: dict[str, str] = field(default_factory=dict)
    """By their role in LayerSpec; empty: Llama's for the placement."""
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    experts: ExpertNames | None = None
    transposed: bool = False
    """Whether the layers' weights lie as [in_features, out_features]."""
    positions: str = ""
    positions_offset: int = 0
    """Rows of the table of positions before that of position 0."""
    project_in: str = ""
    project_out: str = ""
    ignored: tuple[str, ...] = ()
    """Ends of names of tensors that are not needed."""
    ignored_parts: tuple[str, ...] = ()
    """Beginnings of such names."""


_ROTARY_BUFFERS = tuple(f"rotary_emb.{name}" for name in ("inv_freq", "cos_cached", "sin_cached"))
"""Ends of names of what older code computed and saved among the weights."""


def as_found(names: Names, found: Collection[str]) -> Names:
    """Return the names that a checkpoint has them under: those of a model that was saved without its head lack the
    first part, `model.` for most.
    """
    base = names.embedding.partition(".")[0] + "."
    embedding = f"{names.embedding}.weight"
    if embedding in found or embedding.removeprefix(base) not in found:
        return names
    parts = ("embedding", "positions", "layers", "final_norm", "project_in", "project_out")
    return replace(names, **{part: getattr(names, part).removeprefix(base) for part in parts})


def find_prefix(found: Collection[str], prefixes: tuple[str, ...], name: str) -> str:
    """Return which of the prefixes `name` has in a checkpoint; the first where it has none of them."""
    return next((prefix for prefix in prefixes if f"{prefix}{name}" in found), prefixes[0])


def name_decoder(config: ModelConfig, found: Collection[str], names: Names) -> DecoderSpec:
    """Name and measure every tensor of a decoder. `found`: the checkpoint's own names."""
    hidden, narrow = config.hidden_size, config.embedding_size
    positions = config.learned_positions + names.positions_offset
    return DecoderSpec(
        embedding=_vocabulary(config, names.embedding),
        positions=PositionsSpec(names.positions, positions, hidden, names.positions_offset)
        if names.positions
        else None,
        project_in=_linear(names.project_in, hidden, narrow, False, Split.WHOLE) if narrow else None,
        layers=tuple(_Layer(config, names, index).spec() for index in range(config.num_layers)),
        final_norm=_norm(config, names.final_norm) if config.final_norm else None,
        project_out=_linear(names.project_out, narrow, hidden, False, Split.WHOLE) if narrow else None,
        head=None if config.tie_word_embeddings else _vocabulary(config, names.head),
        ignored=_ignored(config, found, names),
    )


def _ignored(config: ModelConfig, found: Collection[str], names: Names) -> frozenset[str]:
    """Return what lies beside the weights: a copy of a tied head, buffers of older files, other parts of a model."""
    tails, heads = (*_ROTARY_BUFFERS, *names.ignored), names.ignored_parts
    others = {name for name in found if name.endswith(tails) or (heads and name.startswith(heads))}
    return frozenset(others | ({f"{names.head}.weight"} if config.tie_word_embeddings else set()))


def _vocabulary(config: ModelConfig, name: str) -> LinearSpec:
    return _linear(name, config.vocab_size, config.embedding_size or config.hidden_size, False, Split.VOCABULARY)


def _linear(name: str, rows: int, in_features: int, bias: bool, split: Split) -> LinearSpec:
    return LinearSpec((Part(name, rows),), in_features, bias, split)


def _norm(config: ModelConfig, name: str, size: int | None = None) -> NormSpec:
    has_weight = config.norm is not NormKind.LAYER_PLAIN
    has_bias = config.norm in (NormKind.LAYER, NormKind.LAYER_PLUS_ONE)
    return NormSpec(name, size or config.hidden_size, has_weight, has_bias)


class _Layer:
    """One layer's tensors."""

    def __init__(self, config: ModelConfig, names: Names, index: int) -> None:
        self._config = config
        self._names = names
        self._prefix = f"{names.layers}.{index}"
        self._index = index
        self._routed = config.layers[index].routed

    def spec(self) -> LayerSpec:
        config, names, prefix = self._config, self._names, self._prefix
        kv_size = config.num_kv_heads * config.head_dim
        sizes = config.num_heads * config.head_dim, kv_size, kv_size
        norms = {
            role: _norm(config, f"{prefix}.{name}")
            for role, name in (names.norms or _LLAMA_NORMS[config.placement]).items()
        }
        if config.qk_norm is not QkNorm.NONE:
            lengths = sizes if config.qk_norm is QkNorm.ALL else (config.head_dim, config.head_dim)
            norms["query_norm"] = _norm(config, f"{prefix}.{names.query_norm}", lengths[0])
            norms["key_norm"] = _norm(config, f"{prefix}.{names.key_norm}", lengths[1])
        interleaved = config.head_dim if names.qkv_interleaved else 0
        qkv = self._stacked(names.qkv, sizes, config.hidden_size, config.qkv_bias, interleaved)
        return LayerSpec(
            qkv=self._with_pairs(qkv) if names.pairs_adjoin else qkv,
            attention_output=self._row(names.attention_output, sizes[0], config.output_bias),
            mlp=self._experts() if self._routed else self._mlp(),
            **norms,
        )

    def _stacked(
        self, names: tuple[str, ...], sizes: tuple[int, ...], in_features: int, bias: bool, interleaved: int = 0
    ) -> LinearSpec:
        """Sections of these sizes, each a tensor, or all of them one."""
        rows = sizes if len(names) == len(sizes) else (sum(sizes),)
        parts = tuple(
            Part(f"{self._prefix}.{name}", size, self._names.transposed, interleaved)
            for name, size in zip(names, rows, strict=True)
        )
        return LinearSpec(parts, in_features, bias, Split.COLUMN, sizes)

    def _with_pairs(self, qkv: LinearSpec) -> LinearSpec:
        rotary = self._config.layers[self._index].rotary
        if rotary is None:
            return qkv
        query, key, value = qkv.parts
        pairs = Pairs(self._config.head_dim, rotary.rotary_dim)
        return replace(qkv, parts=(replace(query, pairs=pairs), replace(key, pairs=pairs), value))

    def _row(self, name: str, in_features: int, bias: bool) -> LinearSpec:
        part = Part(f"{self._prefix}.{name}", self._config.hidden_size, self._names.transposed)
        return LinearSpec((part,), in_features, bias, Split.ROW)

    def _mlp(self) -> MlpSpec:
        config, names, size = self._config, self._names, self._config.intermediate_size
        sizes = (size, size) if config.gated else (size,)
        up = self._stacked(names.up, sizes, config.hidden_size, config.mlp_bias)
        return MlpSpec(up, self._row(names.down, size, config.mlp_bias))

    def _experts(self) -> ExpertsSpec:
        config, names, experts = self._config, self._names.experts, self._config.experts
        assert experts is not None  # ModelConfig
        assert names is not None  # the family's own
        size, hidden = experts.intermediate_size, config.hidden_size

        def expert(index: int) -> MlpSpec:
            prefix = f"{names.experts}.{index}"
            up = self._stacked((f"{prefix}.{names.gate}", f"{prefix}.{names.up}"), (size, size), hidden, False)
            return MlpSpec(up, self._row(f"{prefix}.{names.down}", size, False))

        router = _linear(f"{self._prefix}.{names.router}", experts.num_experts, hidden, False, Split.WHOLE)
        return ExpertsSpec(router, tuple(map(expert, range(experts.num_experts))))
