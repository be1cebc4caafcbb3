"""Looking models over: figures, what fits, and every kind of fault, without serving anything."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import make_llama
from gguf_families import GGUF_FAMILIES
from safetensors.torch import load_file, save_file

from executor_svc.inspection.capacity_report import capacity
from executor_svc.inspection.families import supported
from executor_svc.inspection.model_report import Question, report_on
from executor_svc.kernels import build_kernels
from executor_svc.kv_cache import block_bytes
from executor_svc.models import load_weights
from executor_svc.models.registry import FAMILIES
from octavo.commands.inspect import report as as_text
from octavo.models.prepare import prepare
from octavo.terminal.style import Style


def _report(path: Path, **question: Any) -> dict[str, Any]:
    return report_on(Question(str(path), **question))


def _checks(report: dict[str, Any]) -> dict[str, bool | None]:
    return {check["check"]: check["ok"] for check in report["checks"]}


def test_the_lists_are_those_that_loading_uses() -> None:
    """Every family of the registry is listed, and every architecture that GGUF files may have leads to families."""
    answer = supported()
    assert [each["architecture"] for each in answer["families"]] == list(FAMILIES)
    listed = {name for each in answer["families"] for name in each["gguf"]}
    assert listed == {family.architecture for family in GGUF_FAMILIES.values()}


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_sound_folder(tmp_path: Path, is_prepared: bool) -> None:
    """All checks pass, prepared or not, and the figures are those of the model that is loaded."""
    folder = make_llama(tmp_path, tie=True)
    if is_prepared:
        prepare(str(folder))
    report = _report(folder, dtype="float32")
    assert report["ok"]
    assert _checks(report) == dict.fromkeys(("files", "config", "tensors", "tokenizer"), True)
    model = load_weights(folder, torch.float32, torch.device("cpu"), build_kernels("cpu"))
    assert report["architecture"] == "LlamaForCausalLM"
    assert report["parameters"] == sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert report["weight_bytes"] == 4 * report["parameters"]
    assert report["kv_bytes_per_token"] == block_bytes(model.config, 1, torch.float32)


@pytest.mark.parametrize("name", ["gemma 3", "mixtral", "gpt 2"])
def test_a_sound_gguf_file(tmp_path: Path, name: str) -> None:
    """Files of other families pass too."""
    family = GGUF_FAMILIES[name]
    path = family.write(family.make(tmp_path / "folder"), tmp_path / "model.gguf")
    assert _report(path)["ok"]


def test_a_context_that_opens_when_asked_for(tmp_path: Path) -> None:
    """A model stretched by LongRoPE is served to its unstretched length, unless --max-model-len asks for more."""
    scaling = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    folder = make_llama(tmp_path, rope_scaling=scaling | {"original_max_position_embeddings": 512})
    answer = _report(folder)
    assert (answer["max_position_embeddings"], answer["default_context"]) == (2048, 512)
    shown = as_text(answer, Style(io.StringIO()))
    assert "2048 tokens; 512 unless --max-model-len asks for more" in shown
    plain = as_text(_report(make_llama(tmp_path / "plain")), Style(io.StringIO()))
    assert "unless" not in plain


def test_a_model_of_no_family(tmp_path: Path) -> None:
    """What transformers' code would run is said to, with its figures."""
    import transformers

    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 2}
    folder = make_llama(tmp_path)
    transformers.OlmoForCausalLM(transformers.OlmoConfig(**sizes, **heads)).save_pretrained(folder)
    report = _report(folder, dtype="float32")
    assert report["ok"], report["checks"]
    assert "transformers' code" in report["checks"][1]["text"]
    assert report["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 4


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _misshape(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(47)
    save_file(weights, folder / "model.safetensors")


def _other_vocabulary(folder: Path) -> None:
    document = json.loads((folder / "tokenizer.json").read_text())
    document["model"]["vocab"]["far"] = 5000
    (folder / "tokenizer.json").write_text(json.dumps(document))


def _unknown(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["X"], "model_type": "x"}))


@pytest.mark.parametrize(
    ("damage", "check", "message"),
    [
        (_cut, "files", r"model.safetensors is damaged or incomplete"),
        (_unknown, "config", "'X' is no causal language model"),
        (_misshape, "tensors", "model.norm.weight is [47], not [48]"),
        (_other_vocabulary, "tokenizer", "'far' (5000)"),
    ],
    ids=["files", "config", "tensors", "tokenizer"],
)
def test_faults_are_told_apart(tmp_path: Path, damage: Any, check: str, message: str) -> None:
    """Each fault fails the check that it belongs to, with file and tensor or token; the report is not ok."""
    folder = make_llama(tmp_path)
    damage(folder)
    report = _report(folder)
    assert not report["ok"]
    found = next(each for each in report["checks"] if each["check"] == check)
    assert found["ok"] is False
    assert message in found["text"]
    assert [each["check"] for each in report["checks"]] == ["files", "config", "tensors", "tokenizer"]


def test_what_is_not_there(tmp_path: Path) -> None:
    """A name that leads nowhere is a report too."""
    report = _report(tmp_path / "none")
    assert not report["ok"]
    assert "no model" in report["checks"][0]["text"]


def _capacity(**changes: Any) -> dict[str, Any]:
    question: dict[str, Any] = {"context": None, "batch": None, "kv_memory": None, "available": 2_000_000}
    return capacity(**({"weight_bytes": 1_000_000, "kv_bytes_per_token": 100, "longest": 3000} | question | changes))


def test_what_fits() -> None:
    """KV memory is the executor's share of what the weights leave; sequences at once follow from it."""
    report = _capacity()
    assert report["kv_memory_bytes"] == 600_000
    assert report["kv_tokens"] == 6000
    assert report["sequences"] == [
        {"context": 1024, "sequences": 5},
        {"context": 2048, "sequences": 2},
        {"context": 3000, "sequences": 2},
    ]
    assert "fits" not in report


def test_a_window_leaves_room_for_more() -> None:
    """Where every layer has a window a sequence holds that and two steps of 512 tokens, in whole blocks; below that
    all of itself.
    """
    by_context = {each["context"]: each["sequences"] for each in _capacity(window=100, longest=9000)["sequences"]}
    assert by_context == {1024: 5, 2048: 5, 4096: 5, 8192: 5, 9000: 5}
    held = 16 * (-(-(99 + 1024) // 16) + 1)
    assert _capacity(window=100, longest=9000, context=9000, batch=6000 // held)["fits"]
    assert not _capacity(window=100, longest=9000, context=9000, batch=6000 // held + 1)["fits"]


@pytest.mark.parametrize(
    ("question", "fits"),
    [
        ({"context": 3000, "batch": 2}, True),
        ({"context": 3000, "batch": 3}, False),
        ({"context": 3001}, False),
        ({"batch": 2}, True),
        ({"context": 1000, "kv_memory": 99_999}, False),
        ({"context": 999, "kv_memory": 99_999}, True),
        ({"kv_memory": 1_000_001}, False),
        ({"available": 999_999}, False),
    ],
)
def test_whether_that_fits(question: dict[str, int], fits: bool) -> None:
    """Context and batch against the KV memory, the model's own end, and weights and KV against what is free."""
    assert _capacity(**question)["fits"] is fits


def test_what_it_needs_is_told_beside_what_there_is() -> None:
    """In units that people read, as the rest of the report."""
    gib = 1 << 30
    report = _capacity(available=4 * gib, weight_bytes=2 * gib, kv_bytes_per_token=23040, context=3000, batch=8)
    assert report["verdict"] == "8 x 3000 tokens need 527.3 MiB of the 1228.8 MiB of KV memory"
