"""Faults planted in the kernels: each is found by a comparison with the reference, which the kernels as they are pass.

The comparisons are small ones of the kind that the other modules make at length.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from attention_problem import Problem
from decode_cut import check_cut
from mutants import Fault, load
from triton_faults import FAULTS

from executor_svc.kernels.activation import reference as activation
from executor_svc.kernels.copy_blocks import reference as copying
from executor_svc.kernels.finite import reference as finite
from executor_svc.kernels.logit_bias import reference as logit_bias
from executor_svc.kernels.logprobs import reference as logprobs
from executor_svc.kernels.noise import reference as noise
from executor_svc.kernels.norm import reference as norm
from executor_svc.kernels.paged_attention import reference as attention
from executor_svc.kernels.penalties import reference as penalties
from executor_svc.kernels.rotary_write_kv import QkNorm
from executor_svc.kernels.rotary_write_kv import reference as rotary
from executor_svc.kernels.sampling import reference as sampling

interpreter = pytest.importorskip("triton_interpreter", reason="Triton has no build for this platform")

Check = Callable[[ModuleType], None]


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _attention(module: ModuleType) -> None:
    """Decode in one part and in three, prefill in several tiles; plain, with a window, with a cap."""
    problem = Problem([(1, 33), (1, 530), (9, 40)], heads=(6, 2), head_dim=16)
    # Of each row's last block a part is nobody's: whatever lies there, no output shows it.
    tensors = problem.query, problem.key_cache, problem.value_cache
    for window, soft_cap in ((0, 0.0), (7, 0.0), (0, 0.5)):
        results = [
            plan(problem.metadata, 16)(*tensors, 0.25, window=window, soft_cap=soft_cap)
            for plan in (module.make_plan_attention(interpreter.GPU), attention.plan_attention)
        ]
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def _decode_plan(module: ModuleType) -> None:
    """Rows whole and in parts, one tile of each and three, with a window and without."""
    for group, window in ((4, 0), (40, 0), (40, 300)):
        check_cut(module.plan_decode, (33, 5030, 1, 700), 4, group=group, num_kv_heads=2, window=window, large_tile=16)


def _rotary(module: ModuleType) -> None:
    """Heads turned in part, plain and normed."""
    qkv, (cos, sin) = _random(3, 5 * 12), (_random(3, 4, seed=seed) for seed in (1, 2))
    slots = torch.tensor([5, 9, 2])
    for qk_norm in (None, QkNorm(_random(12, seed=3), _random(12, seed=4), 1e-2)):
        results = []
        for op in (module.rotary_write_kv, rotary.rotary_write_kv):
            caches = [torch.zeros(3, 4, 1, 12) for _ in range(2)]
            results.append((op(qkv, cos, sin, slots, *caches, qk_norm=qk_norm), *caches))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def _norm(module: ModuleType) -> None:
    """Both norms after an addition, at a width that fills no vector, in bfloat16 so that the sum's rounding shows."""
    for name, extra in (("add_rms_norm", ()), ("add_layer_norm", (_random(33, seed=3).bfloat16(),))):
        x, before, weight = (_random(3, 33, seed=seed).bfloat16() for seed in range(3))
        residuals = before.clone(), before.clone()
        result = getattr(module, name)(x, residuals[0], weight[0], *extra, 0.5)
        expected = getattr(norm, name)(x, residuals[1], weight[0], *extra, 0.5)
        assert torch.equal(*residuals)
        torch.testing.assert_close(result.float(), expected.float(), rtol=8e-3, atol=1e-3)
        alone = getattr(module, name.removeprefix("add_"))(residuals[0], weight[0], *extra, 0.5)
        assert torch.equal(result, alone)


def _activation(module: ModuleType) -> None:
    gate_up = _random(3, 66)
    torch.testing.assert_close(module.silu_and_mul(gate_up), activation.silu_and_mul(gate_up), rtol=1e-6, atol=1e-6)
    for tanh in (False, True):
        for name in ("gelu", "gelu_and_mul"):
            result, expected = (getattr(each, name)(gate_up, tanh=tanh) for each in (module, activation))
            torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)


def _units(exponent: float) -> float:
    """Units of 2^-44 of an exponent's weight, not yet rounded."""
    return float(np.float32(np.exp(np.float64(exponent)))) * 2.0**44


def _exponent_of(least: float) -> float:
    """The lowest float32 whose weight has so many units; below 2^16 of them they come in steps of less than 1/5."""
    exponent = np.float32(np.log(least * 2.0**-44) - 1e-4)
    while _units(exponent) < least:
        exponent = np.nextafter(exponent, np.float32(0))
    return float(exponent)


_SECOND = float(np.float32(-16.65))
_THIRD = _exponent_of(2**20 + 0.6 - round(_units(_SECOND)))
_HALF = _exponent_of(2**14 + 0.5)

# Logits, temperature, top_k, top_p, min_p, typical_p, uniform.
_Case = tuple[list[float], float, int, float, float, float, float]
_TOP = 1 - 2**-53
_LEVELS = [-1.0, -2.5, -1.0, -3.0, -2.0, -2.0, -4.0, -1.5, -2.5, -2.0, -1.5, -3.0]
_FILTERED: list[_Case] = [
    (_LEVELS, 0.0, 0, 1.0, 0.0, 1.0, 0.0),
    (_LEVELS, 0.5, 0, 1.0, 0.0, 1.0, 0.6),
    (_LEVELS, 2.0, 1, 1.0, 0.0, 1.0, _TOP),
    (_LEVELS, 2.0, 3, 1.0, 0.0, 1.0, _TOP),
    (_LEVELS, 2.0, 5, 1.0, 0.0, 1.0, 0.7),
    (_LEVELS, 2.0, 6, 1.0, 0.0, 1.0, _TOP),
    (_LEVELS, 2.0, 0, 0.3, 0.0, 1.0, _TOP),
    (_LEVELS, 2.0, 0, 0.5, 0.0, 1.0, _TOP),
    (_LEVELS, 2.0, 7, 0.5, 0.0, 1.0, _TOP),
    (_LEVELS, 2.0, 7, 0.9, 0.0, 1.0, _TOP),
    (_LEVELS, 2.0, 0, 1.0, 0.5, 1.0, _TOP),
    (_LEVELS, 2.0, 0, 1.0, 1.0, 1.0, 0.6),
    (_LEVELS, 2.0, 0, 1.0, 0.0, 0.4, 0.1),
    (_LEVELS, 2.0, 0, 1.0, 0.0, 0.4, _TOP),
    (_LEVELS, 2.0, 0, 1.0, 0.0, 0.9, _TOP),
    (_LEVELS, 2.0, 9, 0.9, 0.4, 0.6, 0.5),
]
_LOWEST = float("-inf")
_EDGES: list[_Case] = [
    # The tokens have 2^44 + 2^20 + 1 units: this share of them is 15/16 more than what the first has.
    ([0.0, _SECOND, _THIRD], 1.0, 0, 1 - 2**-24, 0.0, 1.0, _TOP),
    # Rounded, the second token's units are one more than cut, and the draw falls on the first of them.
    ([0.0, _HALF, _LOWEST], 1.0, 0, 1.0, 0.0, 1.0, float(np.nextafter(2**44 / (2**44 + 2**14 + 1), 1))),
    # The greatest number draws the last token that has a weight.
    ([0.0, -5.0, _LOWEST], 1.0, 0, 1.0, 0.0, 1.0, _TOP),
]


def _same_tokens(module: ModuleType, cases: list[_Case], vocab: int) -> None:
    """Draw from rows whose further tokens have no weight, but for one near the end that has that of the highest."""
    logits = torch.full((len(cases), vocab), _LOWEST)
    for row, (values, *_) in enumerate(cases):
        logits[row, : len(values)] = torch.tensor(values)
        if vocab > len(values):
            logits[row, -50] = max(values)
    temperature, top_k, top_p, min_p, typical_p, uniform = zip(*(case[1:] for case in cases), strict=True)
    parameters = {"temperature": torch.tensor(temperature), "top_k": torch.tensor(top_k), "top_p": torch.tensor(top_p)}
    parameters |= {"min_p": torch.tensor(min_p), "typical_p": torch.tensor(typical_p)}
    parameters["uniform"] = torch.tensor(uniform, dtype=torch.float64)
    expected = sampling.sample_tokens(logits, **parameters)
    assert module.sample_tokens(logits, **parameters).tolist() == expected.tolist()


def _sampling(module: ModuleType) -> None:
    """Every filter alone and with others, the edges where one unit decides, and rows in two chunks."""
    _same_tokens(module, _FILTERED, len(_LEVELS))
    _same_tokens(module, _EDGES, 3)
    _same_tokens(module, [_FILTERED[0], _FILTERED[1], _FILTERED[6], (*_FILTERED[1][:6], _TOP)], 4200)


def _noise(module: ModuleType) -> None:
    columns = torch.tensor([2**64 - 3, 7], dtype=torch.uint64), torch.tensor([3, 2**32 - 1]), torch.tensor([2**31, 5])
    assert module.uniform(*columns, 2).tolist() == noise.uniform(*columns, 2).tolist()


def _penalties(module: ModuleType) -> None:
    tokens = torch.tensor([[0, 1, 1, 2, 2, 2, 5], [9, 9, 9, 9, 9, 9, 9], [3, 3, 4, 6, 7, 7, 8]], dtype=torch.int32)
    columns = [torch.tensor(each) for each in ([1.3, 1.0], [0.7, 0.1], [0.3, -0.9])]
    columns[0][0] = 1e-40
    logits = torch.arange(20.0).view(2, 10) - 4
    # Of the prompt alone, in a row without repetition.
    logits[1, 0] = _LOWEST
    results = []
    for op in (module.apply_penalties, penalties.apply_penalties):
        changed = logits.clone()
        op(
            changed,
            tokens=tokens,
            slots=torch.tensor([2, 0]),
            num_prompt_tokens=torch.tensor([2, 3]),
            num_tokens=torch.tensor([6, 5]),
            repetition=columns[0],
            presence=columns[1],
            frequency=columns[2],
        )
        results.append(changed)
    assert torch.equal(*results)


_LISTS = {"token_ids": torch.tensor([3, 1, 0, 2]), "begins": torch.tensor([2, 0]), "ends": torch.tensor([3, 2])}


def _logit_bias(module: ModuleType) -> None:
    values = torch.tensor([3e38, 2e37, 3e37, 4e37])
    logits = torch.full((2, 5), 1e38)
    changed, expected = logits.clone(), logits.clone()
    module.add_logit_bias(changed, values=values, **_LISTS)
    logit_bias.add_logit_bias(expected, values=values, **_LISTS)
    assert torch.equal(changed, expected)


def _forbidden(module: ModuleType) -> None:
    logits = torch.arange(10.0).view(2, 5)
    module.forbid_tokens(logits, **_LISTS)
    lowest = float("-inf")
    assert logits.tolist() == [[lowest, 1, 2, 3, 4], [5, lowest, 7, lowest, 9]]


def _logprobs(module: ModuleType) -> None:
    logits = (_random(2, 4200) * 2).round()
    logits[:, 4150] = 12.0
    results = [each.gather_logprobs(logits, torch.tensor([5, 4150]), 6) for each in (module, logprobs)]
    assert torch.equal(results[0][1], results[1][1])
    for column in (0, 2):
        torch.testing.assert_close(results[0][column], results[1][column], rtol=0, atol=1e-5)


def _finite(module: ModuleType) -> None:
    for width in (4100, 33_000):
        values = _random(5, width)
        values[0, width - 1], values[1, 0], values[2, 7] = torch.nan, torch.inf, -torch.inf
        values[3, width // 2] = torch.nan
        assert torch.equal(module.finite_rows(values), finite.finite_rows(values))


def _copy(module: ModuleType) -> None:
    caches = [_random(5, 3, 2, 4, seed=seed) for seed in (1, 2)]
    expected = [cache.clone() for cache in caches]
    places = torch.tensor([4, 1]), torch.tensor([0, 2])
    module.copy_blocks(*caches, *places)
    copying.copy_blocks(*expected, *places)
    assert all(torch.equal(*pair) for pair in zip(caches, expected, strict=True))


CHECKS: dict[str, Check] = {
    "paged_attention": _attention,
    "decode_plan": _decode_plan,
    "rotary_write_kv": _rotary,
    "norm": _norm,
    "activation": _activation,
    "sampling": _sampling,
    "noise": _noise,
    "penalties": _penalties,
    "logit_bias": _logit_bias,
    "forbidden": _forbidden,
    "logprobs": _logprobs,
    "finite": _finite,
    "copy_blocks": _copy,
}

BETWEEN = {
    ("device_math.triton_impl", "sampling"): ("selection.triton_impl",),
}
"""Modules that lie between the one with the fault and the op's own."""


def _run(op: str, folder: Path, fault: Fault | None) -> None:
    interpreter.use()
    between = BETWEEN.get((fault.module, op), ()) if fault is not None else ()
    module = load(f"{op}.triton_impl", folder, fault, between)
    interpreter.quiet(CHECKS[op])(module)


@pytest.mark.parametrize("op", list(CHECKS))
def test_the_kernels_as_they_are_pass(op: str, tmp_path: Path) -> None:
    """Loaded anew from their text they are what they were: what finds a fault is not the loading."""
    _run(op, tmp_path, None)


@pytest.mark.parametrize(
    ("op", "fault"),
    [pytest.param(op, fault, id=f"{op}: {fault.name}") for op, faults in FAULTS.items() for fault in faults],
)
def test_a_planted_fault_is_found(op: str, fault: Fault, tmp_path: Path) -> None:
    """The comparison fails for every fault, and fails by what it compares."""
    with pytest.raises(AssertionError):
        _run(op, tmp_path, fault)
