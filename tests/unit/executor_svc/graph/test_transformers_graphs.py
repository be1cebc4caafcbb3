"""Layers of transformers' own modules as graphs: GPT-2, OPT and Llama, fused, against the modules themselves."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from model_variations import GPT2_SIZES, OPT_SIZES, SIZES
from paged import PagedLoop, PagedSequence, ragged_metadata
from torch import Tensor

from executor_svc.graph import ops
from executor_svc.graph.model_graph import census
from executor_svc.graph.optimize import PASSES, choose_passes, optimize
from executor_svc.kernels import build_kernels
from executor_svc.kv_cache import KVCache
from executor_svc.models.paged_interface import NAME
from executor_svc.models.transformers_graph import capture_layers, compile_layers
from executor_svc.models.transformers_lm import load_transformers_lm

CPU = torch.device("cpu")
TOKENS = torch.arange(5, 15)
MODELS = {
    "GPT-2": ("GPT2Config", GPT2_SIZES),
    "OPT": ("OPTConfig", {**OPT_SIZES, "word_embed_proj_dim": OPT_SIZES["hidden_size"]}),
    "Llama": ("LlamaConfig", SIZES),
}


def _module(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Return a random module, and what a graph must know of it."""
    config_class, sizes = MODELS[name]
    config = getattr(transformers, config_class)(**sizes, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to(dtype)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", heads)
    layers = config.num_hidden_layers
    return model, SimpleNamespace(num_kv_heads=kv_heads, head_dim=config.hidden_size // heads, num_layers=layers)


def _hidden(layers: Any, config: Any, dtype: torch.dtype) -> Tensor:
    """Run the tokens by a chunk of 6 and then one by one."""
    cache = KVCache.allocate(config, 4, 8, dtype, CPU)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(torch.nan)
    rows, computed = [], 0
    for size in (6, 1, 1, 1, 1):
        metadata = ragged_metadata([([1, 2], computed, size)], 8)
        rows.append(layers.forward(TOKENS[computed : computed + size], metadata, cache).clone())
        computed += size
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        pytest.param(name, kernels, marks=() if (name, kernels) == ("GPT-2", "cpu") else pytest.mark.full)
        for name in MODELS
        for kernels in ("cpu", "reference")
    ],
)
def test_graphs_compute_what_the_modules_do(name: str, kernels: str) -> None:
    """In float32 to 1e-6 of the largest, with all passes, with none and with all but each one that matches."""
    model, config = _module(name)
    with torch.inference_mode():
        expected = model.base_model(TOKENS[None]).last_hidden_state[0]
    model.set_attn_implementation(NAME)
    chosen = [PASSES, choose_passes("none")]
    if kernels == "cpu":
        runs = optimize(capture_layers(model, config)[2].graph)
        chosen += [choose_passes(f"-{run.name}") for run in runs if run.matches]
    for passes in chosen:
        layers = compile_layers(model, config, build_kernels(kernels), passes)
        assert layers is not None
        with torch.inference_mode():
            given = _hidden(layers, config, torch.float32)
        torch.testing.assert_close(given, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("name", MODELS)
def test_the_same_ops_come_out_as_of_our_own_decoder(name: str) -> None:
    """Nothing plain is left where a fused op would do, in bfloat16 too, whose casts are in the exported graph."""
    model, config = _module(name, torch.bfloat16)
    model.set_attn_implementation(NAME)
    graph = capture_layers(model, config)[2].graph
    optimize(graph)
    counts, layers = census(graph), config.num_layers
    assert counts["rotary_write_kv"] == counts["attention"] == layers
    assert counts["linear_activation"] == layers
    assert counts["linear"] == 3 * layers
    assert counts["add_rms_norm" if name == "Llama" else "add_layer_norm"] == 2 * layers
    plain = {ops.add, ops.multiply, ops.silu, ops.gelu, ops.relu, ops.rotary, ops.write_kv, ops.columns, ops.heads}
    assert not {op.name for op in plain} & counts.keys()


@pytest.mark.parametrize("name", MODELS)
def test_graphs_in_bfloat16(name: str) -> None:
    """Within what bfloat16 keeps, of the module in float32."""
    model, config = _module(name, torch.bfloat16)
    with torch.inference_mode():
        expected = model.float().base_model(TOKENS[None]).last_hidden_state[0]
    model.bfloat16().set_attn_implementation(NAME)
    layers = compile_layers(model, config, build_kernels("cpu"), PASSES)
    assert layers is not None
    with torch.inference_mode():
        given = _hidden(layers, config, torch.bfloat16).float()
    assert float((given - expected).abs().max()) < 0.06 * float(expected.abs().max())


def _save(folder: Path, config_class: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**{**SIZES, **fields}, bos_token_id=1, eos_token_id=2)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("passes", ["all", "none"])
def test_the_fallback_serves_a_graph(tmp_path: Path, passes: str) -> None:
    """A model that is none of the families runs as a graph, recorded, with transformers' own logits; the weights that
    the graph has packed are given back.
    """
    theirs = _save(tmp_path, "Starcoder2Config")
    model = load_transformers_lm(tmp_path, torch.float32, CPU, build_kernels("cpu"), passes=choose_passes(passes))
    assert model.graph is not None
    loop, sequence = PagedLoop(model, block_size=8, num_blocks=16), PagedSequence(TOKENS.tolist())
    given = torch.stack([loop.step([(sequence, size)])[0] for size in (6, 1, 1, 1, 1)])
    with torch.inference_mode():
        expected = theirs(TOKENS[None]).logits[0, 5:]
    torch.testing.assert_close(given, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))
    assert model.graph._body.num_programs == 2  # type: ignore[attr-defined]
    kept = sum(weight.numel() for weight in model._base.parameters())
    assert kept < sum(weight.numel() for weight in theirs.model.parameters()) / 2


def test_what_is_not_known_runs_as_its_own_code(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Partial rotary embeddings are none of the known patterns: the reason is logged, and the model served."""
    theirs = _save(tmp_path, "StableLmConfig", hidden_size=64)
    with caplog.at_level(logging.INFO, logger="executor_svc.models.transformers_graph"):
        model = load_transformers_lm(tmp_path, torch.float32, CPU, build_kernels("cpu"))
    assert model.graph is None
    (reason,) = [record.fields["reason"] for record in caplog.records if "own code" in record.message]  # type: ignore[attr-defined]
    assert "aten." in reason
    loop, sequence = PagedLoop(model, block_size=8, num_blocks=16), PagedSequence(TOKENS.tolist())
    with torch.inference_mode():
        expected = theirs(TOKENS[None]).logits[0, -1]
    given = loop.step([(sequence, len(TOKENS))])[0]
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
