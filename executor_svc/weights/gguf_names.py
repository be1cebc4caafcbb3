"""GGUF's names of tensors, and what the checkpoints of the Hugging Face format call them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from executor_svc.weights.gguf_layout import Layout
from octavo.models.gguf_file import TensorEntry

ROTARY_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Divisors of the rotary frequencies, float32 [rotary dimensions / 2]: part of the config, not of the weights."""


@dataclass(frozen=True)
class TensorNames:
    """The names of one architecture, without `.weight` and `.bias`.

    `whole` and `block` map GGUF's to the checkpoint's, `block` those behind `blk.N.` to those behind `LAYERS.N.`.
    `experts` maps the stacked ones of a block to the checkpoint's for each expert, with `{}` for its number; two names
    where gate and up are stacked too. `layouts` has the names, without `blk.N.`, that the converter changed.
    """

    whole: Mapping[str, str]
    block: Mapping[str, str]
    layers: str = "model.layers"
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    layouts: Mapping[str, Layout] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """Where a checkpoint's tensor lies: some rows of one in the file.

    `shape` is the checkpoint's. `first_row` and `num_rows` count the file's rows, of the last dimension each.
    """

    entry: TensorEntry
    layout: Layout
    shape: tuple[int, ...]
    first_row: int
    num_rows: int


def find_sources(names: TensorNames, entries: Iterable[TensorEntry]) -> Iterator[tuple[str, Source]]:
    """Yield the checkpoint's tensors by name. One whose name has no translation keeps it: it is surplus."""
    for entry in entries:
        stem, _, kind = entry.name.rpartition(".")
        prefix, _, rest = stem.partition(".")
        index, _, part = rest.partition(".")
        if prefix != "blk" or not index.isdecimal():
            layout = names.layouts.get(stem, Layout.SAME)
            found = f"{names.whole[stem]}.{kind}" if stem in names.whole else entry.name
            yield found, _source(entry, layout)
        elif part in names.experts and len(entry.shape) == 3:
            yield from _experts(entry, [f"{names.layers}.{index}.{name}.{kind}" for name in names.experts[part]])
        else:
            known = names.block.get(part) or _expert_name(names, part)
            found = f"{names.layers}.{index}.{known}.{kind}" if known else entry.name
            yield found, _source(entry, names.layouts.get(part, Layout.SAME))


def _source(entry: TensorEntry, layout: Layout) -> Source:
    shape = entry.shape
    if layout is Layout.TRANSPOSED and len(shape) != 2:  # a bias
        layout = Layout.SAME
    num_rows = 1
    for size in shape[:-1] if len(shape) > 1 else shape:
        num_rows *= size
    return Source(entry, layout, shape[::-1] if layout is Layout.TRANSPOSED else shape, 0, num_rows)


def _experts(entry: TensorEntry, names: list[str]) -> Iterator[tuple[str, Source]]:
    """Yield each expert's share of a stack [experts, rows, columns]; `names` share an expert's rows evenly."""
    num_experts, rows, columns = entry.shape
    each = rows // len(names)
    for expert in range(num_experts):
        for index, name in enumerate(names):
            source = Source(entry, Layout.SAME, (each, columns), expert * rows + index * each, each)
            yield name.replace("{}", str(expert)), source


def _expert_name(names: TensorNames, part: str) -> str | None:
    """Return the name of an expert's own tensor, `ffn_gate.3`, as files of before 2024 have them."""
    stem, _, expert = part.rpartition(".")
    found = names.experts.get(f"{stem}_exps", ())
    return found[0].replace("{}", expert) if len(found) == 1 and expert.isdecimal() else None


_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_GATED_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_TWO_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_INTERLEAVED = {"attn_q": Layout.INTERLEAVED, "attn_k": Layout.INTERLEAVED}
_GEMMA_NORMS = ("output_norm", "attn_norm", "ffn_norm", *_QK_NORMS, *_POST_NORMS)
_PLUS_ONE = dict.fromkeys(_GEMMA_NORMS, Layout.PLUS_ONE)
_MIXTRAL_EXPERTS = {
    f"ffn_{part}_exps": (f"block_sparse_moe.experts.{{}}.{name}",)
    for part, name in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
}
_QWEN_EXPERTS: dict[str, tuple[str, ...]] = {
    f"ffn_{part}_exps": (f"mlp.experts.{{}}.{part}_proj",) for part in ("gate", "up", "down")
}
_QWEN_EXPERTS["ffn_gate_up_exps"] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")

LLAMA = TensorNames(
    _WHOLE,
    _ATTENTION | _GATED_MLP | _TWO_NORMS | {"ffn_gate_inp": "block_sparse_moe.gate"},
    experts=_MIXTRAL_EXPERTS,
    layouts=_INTERLEAVED,
)
QWEN2 = TensorNames(_WHOLE, _ATTENTION | _GATED_MLP | _TWO_NORMS)
QWEN3 = TensorNames(
    _WHOLE,
    _ATTENTION | _GATED_MLP | _TWO_NORMS | _QK_NORMS | {"ffn_gate_inp": "mlp.gate"},
    experts=_QWEN_EXPERTS,
)
GEMMA = TensorNames(_WHOLE, _ATTENTION | _GATED_MLP | _TWO_NORMS, layouts=_PLUS_ONE)
GEMMA2 = TensorNames(
    _WHOLE,
    _ATTENTION
    | _GATED_MLP
    | _QK_NORMS
    | _POST_NORMS
    | {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"},
    layouts=_PLUS_ONE,
)
OLMO2 = TensorNames(_WHOLE, _ATTENTION | _GATED_MLP | _QK_NORMS | _POST_NORMS)
PHI3 = TensorNames(
    _WHOLE,
    _TWO_NORMS
    | {
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
    },
)
GPT2 = TensorNames(
    {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    layers="transformer.h",
    layouts=dict.fromkeys(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), Layout.TRANSPOSED),
)
GPT_NEOX = TensorNames(
    {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
    {
        "attn_norm": "input_layernorm",
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    layers="gpt_neox.layers",
    layouts={"attn_qkv": Layout.QKV_BY_KIND},
)
