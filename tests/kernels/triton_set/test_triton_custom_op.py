"""A user's own operator in Triton, interpreted: found in a module, checked at load, run in the place of a match."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from graph_models import load, logits_of, saved_folder
from model_variations import FIRSTS

from executor_svc.graph.custom import CustomOpError, bind_ops, load_ops
from executor_svc.graph.optimize import PASSES, choose_passes
from executor_svc.kernels import KernelSet

CPU = torch.device("cpu")
LLAMA = FIRSTS[0]
MODULE = """
import torch
import triton
import triton.language as tl

from executor_svc.graph import ops
from executor_svc.graph.custom import CustomOp


@triton.jit
def _gate(gate, up, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < count, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(out + at, g / (1.0 + tl.exp(-g)) * u, mask=at < count)


def launch(gate, up):
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    _gate[(triton.cdiv(out.numel(), 256),)](gate, up, out, out.numel(), BLOCK=256)
    return out


def examples(dtype):
    return [(torch.linspace(-3, 3, rows * 33).view(rows, 33).to(dtype), torch.ones(rows, 33, dtype=dtype) * 2)
            for rows in (1, 17)]


OPS = [CustomOp("own_gate", "SiLU times up", lambda gate, up: ops.multiply(ops.silu(gate), up),
                lambda gate, up: torch.nn.functional.silu(gate) * up, examples, triton=launch)]
"""


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_a_kernel_of_a_users_own_runs_or_is_refused(
    triton_set: KernelSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, wrong: bool
) -> None:
    """It takes every gate of a Llama and the logits stay the same; one that computes something else is not let in."""
    name = f"own_triton_{'wrong' if wrong else 'right'}"
    source = MODULE.replace("1.0 + tl.exp(-g)", "2.0 + tl.exp(-g)") if wrong else MODULE
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        own = load_ops(name)
        if wrong:
            with pytest.raises(CustomOpError, match=re.escape("own_gate, example 0, result 0: differs from the refer")):
                bind_ops(own, triton_set, torch.float32, CPU)
            return
        (bound,) = bind_ops(own, triton_set, torch.float32, CPU)
        folder = saved_folder(tmp_path, LLAMA)
        expected = logits_of(load(folder, LLAMA, triton_set, choose_passes("none")))
        model = load(folder, LLAMA, triton_set, (bound, *PASSES))
        assert model.layers.source.count("own_gate(") == 2
        torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    finally:
        sys.modules.pop(name, None)
