"""Every kernel compiled for GPUs that are not here: what its binaries take is within the budget beside it, and what
must stand in their text does.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from mutants import Fault

from executor_svc.kernels.gpu import Budget

pytest.importorskip("triton", reason="Triton has no build for this platform")

SCRIPT = Path(__file__).parents[2] / "gpu" / "compile_ahead.py"
KERNELS = Path(importlib.import_module("executor_svc.kernels").__file__ or "").parent
TARGETS = ("sm_90", "gfx942", "sm_80")
EVERYDAY = "sm_90"
"""Its compiler takes half a minute of a core: the others are left to `make test-full`."""
_TARGETS = [pytest.param(name, marks=() if name == EVERYDAY else pytest.mark.full) for name in TARGETS]
each_target = pytest.mark.parametrize("target", _TARGETS)
# The first test of a target waits for its compiler, which shares the cores with other tests.
pytestmark = pytest.mark.timeout(600)

Form = dict[str, Any]


def _compile(target: str, cache_folder: Path, *arguments: str) -> list[Form]:
    environ = os.environ | {"TRITON_CACHE_DIR": str(cache_folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), target, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


class _Forms(dict[str, list[Form]]):
    """Compiles what is asked for and not there."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, target: str) -> list[Form]:
        self[target] = _compile(target, self._folder)
        return self[target]


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Form]]:
    """By target: every form of every kernel, as it is launched. Compiled when first asked for."""
    return _Forms(tmp_path_factory.mktemp("triton"))


@cache
def budget_of(op: str, kernel: str) -> Budget:
    """The budget that stands beside a kernel."""
    budgets: dict[str, Budget] = importlib.import_module(f"executor_svc.kernels.{op}.triton_impl").BUDGETS
    return budgets[kernel]


def over_budget(found: list[Form]) -> Iterator[str]:
    """Name each form that takes more than it may, and what."""
    for form in found:
        budget = budget_of(form["op"], form["kernel"])
        for figure in ("registers", "shared_bytes", "spilled_bytes"):
            if form[figure] > getattr(budget, figure):
                yield f"{form['launch']}: {form['kernel']} {form['constants']}: {form[figure]} {figure}"


def faults_in_text(found: list[Form]) -> Iterator[str]:
    """Name each form for NVIDIA's GPUs whose text lacks what it must have, or has what it must not."""
    for form in found:
        text, name = form["text"], f"{form['launch']}: {form['kernel']}"
        if form["kernel"] == "_attend" and "float32" not in form["launch"] and (not text["mma"] or text["fused"] > 200):
            yield f"{name} multiplies outside the matrix units"
        if form["op"] in ("paged_attention", "norm", "activation") and not text["wide_load"]:
            yield f"{name} loads single words"
        if form["kernel"] == "_change" and text["fused"]:
            yield f"{name} fuses a product with a difference, whose rounding is the contract's"
        if form["kernel"] in ("_change", "_weigh", "_cut_ranks", "_cut_distances") and not text["division"]:
            yield f"{name} divides inexactly"
        if form["kernel"] == "_cut_ranks" and text["source_barriers"] != 3:
            yield f"{name} reads candidates that other threads may not have written yet, or writes those still read"
        if form["kernel"] == "_cut_distances" and text["source_barriers"] != 1:
            yield f"{name} reads candidates that other threads may not have written yet"


@each_target
def test_every_form_is_within_its_budget(forms: dict[str, list[Form]], target: str) -> None:
    """Registers and shared memory let enough programs run side by side, and nothing is spilled."""
    assert list(over_budget(forms[target])) == []


@pytest.mark.parametrize("target", [each for each in _TARGETS if "sm_" in str(each.values)])
def test_what_must_stand_in_the_text_does(forms: dict[str, list[Form]], target: str) -> None:
    """Matrix units, wide loads, exact divisions, unfused products, and the barriers between writing and reading."""
    assert list(faults_in_text(forms[target])) == []


@each_target
def test_every_kernel_is_compiled(forms: dict[str, list[Form]], target: str) -> None:
    """Each kernel that has a budget was launched, and each that was launched has one that some form comes near to."""
    launched = {(form["op"], form["kernel"]) for form in forms[target]}
    ops = {path.parent.name for path in KERNELS.glob("*/triton_impl.py")}
    budgets = {
        (op, kernel): budget
        for op in ops
        for kernel, budget in getattr(
            importlib.import_module(f"executor_svc.kernels.{op}.triton_impl"), "BUDGETS", {}
        ).items()
    }
    assert launched == set(budgets)


@pytest.mark.full
def test_budgets_are_no_wider_than_they_need_to_be(forms: dict[str, list[Form]]) -> None:
    """Some form takes half of each kernel's registers or more: a budget that nothing comes near says nothing."""
    most: dict[tuple[str, str], int] = {}
    for form in (form for target in TARGETS for form in forms[target]):
        key = form["op"], form["kernel"]
        most[key] = max(most.get(key, 0), form["registers"])
    assert [key for key, registers in most.items() if registers * 2 < budget_of(*key).registers] == []


_ATTENTION, _WIDE = "paged_attention.triton_impl", "attention bfloat16 4 128"
PLANTED: list[tuple[Fault, str, str]] = [
    (
        Fault("no barrier after candidates are written", "selection.triton_impl", "    tl.debug_barrier()\n", ""),
        "logits",
        "_cut_distances",
    ),
    (
        Fault(
            "no barrier before they are written again", "sampling.triton_impl", "            tl.debug_barrier()\n", ""
        ),
        "logits",
        "_cut_ranks",
    ),
    (
        Fault("a fused product", "penalties.triton_impl", "enable_fp_fusion=False", "enable_fp_fusion=True"),
        "logits",
        "_change",
    ),
    (
        Fault("an inexact division", "penalties.triton_impl", "tl.div_rn(x, factor + tl.zeros_like(x))", "x / factor"),
        "logits",
        "_change",
    ),
    (
        Fault(
            "numbers widened for the interpreter",
            _ATTENTION,
            "tl.dot(lines, keys",
            "tl.dot(lines.to(tl.float32), keys.to(tl.float32)",
        ),
        _WIDE,
        "_attend",
    ),
    (Fault("too large a tile", _ATTENTION, "_Shape(64, block_tokens", "_Shape(256, block_tokens"), _WIDE, "_attend"),
    (Fault("too many stages", _ATTENTION, "min(3, stages)", "min(9, stages)"), _WIDE, "_attend"),
    (
        Fault(
            "single words", _ATTENTION, "dim = tl.arange(0, block_dim)", "dim = (tl.arange(0, block_dim) * 3) // 3", -1
        ),
        _WIDE,
        "_attend",
    ),
]
"""Each with the launch and the kernel that it shows in."""


def _check_planted(planted: list[tuple[Fault, str, str]], folder: Path) -> None:
    modules = []
    for index, (fault, launch, kernel) in enumerate(planted):
        path = folder / f"planted_{index}.py"
        source = (KERNELS / fault.module.replace(".", "/")).with_suffix(".py").read_text()
        path.write_text(fault.planted(source))
        module = f"executor_svc.kernels.{fault.module}"
        modules.append({"module": module, "file": str(path), "launch": launch, "kernel": kernel})
    found = _compile("sm_90", folder, "--planted", json.dumps(modules))
    for index, (fault, _, _) in enumerate(planted):
        forms = [form for form in found if form["planted"] == index]
        assert forms, fault.name
        assert [*over_budget(forms), *faults_in_text(forms)], fault.name


def test_missing_barriers_are_found(tmp_path: Path) -> None:
    """Which no interpreter shows, as its threads run one after the other: each barrier that is left out is seen."""
    barriers = [each for each in PLANTED if "barrier" in each[0].name]
    assert len(barriers) == 2
    _check_planted(barriers, tmp_path)


@pytest.mark.full
def test_planted_faults_are_found_in_the_binary(tmp_path: Path) -> None:
    """Faults that no interpreter shows are seen in what is compiled, each of them."""
    _check_planted(PLANTED, tmp_path)


@pytest.mark.full
@pytest.mark.timeout(3600)
@each_target
def test_further_forms_are_within_their_budgets(target: str, tmp_path: Path) -> None:
    """Other widths of heads and rows, windows and caps, of every dtype."""
    found = _compile(target, tmp_path, "--every")
    assert list(over_budget(found)) == []
    if target != "gfx942":
        assert list(faults_in_text(found)) == []
