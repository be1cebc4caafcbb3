"""The page on models: its table is that of the tests, its example of a family runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from model_variations import PROOFS, save_fallback
from paged import PagedLoop, PagedSequence
from pages import ROOT, blocks

from executor_svc.kernels import build_kernels
from executor_svc.models import load_weights
from executor_svc.models.registry import FAMILIES

PAGE = ROOT / "docs" / "models.md"


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("models_table", ROOT / "scripts" / "models_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_that_of_the_tests() -> None:
    """A variation that is added, renamed or taken away is so on the page; `python scripts/models_table.py` does it."""
    text = PAGE.read_text(encoding="utf-8")
    assert text == _script().with_table(text)


def test_every_proof_has_its_test() -> None:
    """What the table says is proven is the work of a test that is there, with both kernel sets."""
    source = (ROOT / "tests" / "unit" / "executor_svc" / "test_model_families.py").read_text(encoding="utf-8")
    assert all(f"def {test}(" in source for test in PROOFS.values())
    assert 'params=["reference", "cpu"]' in source


def test_every_family_is_listed() -> None:
    """The page names every architecture that has a family."""
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in FAMILIES if f"`{name}`" not in text] == []


def test_the_example_of_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that the page shows gives transformers' logits, to 1e-5 of the largest."""
    (example,) = blocks(PAGE, ("python",))
    names: dict[str, object] = {}
    exec(compile(example.source, str(PAGE), "exec"), names)
    assert len(example.source.splitlines()) < 60
    monkeypatch.setitem(FAMILIES, "SeedOssForCausalLM", names["SEED_OSS"])  # type: ignore[arg-type]
    theirs = save_fallback(tmp_path, "SeedOssConfig", attention_out_bias=True, head_dim=16)
    prompt = list(range(3, 48))
    with torch.inference_mode():
        expected = theirs(input_ids=torch.tensor([prompt])).logits[0, -1]
    model = load_weights(tmp_path, torch.float32, torch.device("cpu"), build_kernels("cpu"))
    ours = PagedLoop(model, num_blocks=16).step([(PagedSequence(prompt), len(prompt))])[0]
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
