"""Every op of a set on its device against the reference on the CPU: small odd shapes, each in seconds.

The long suites run under Triton's interpreter, in tests/kernels; this is what only a GPU can add to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from random_decoder import batch
from torch import Tensor

from executor_svc.kernels import KernelSet, build_kernels
from executor_svc.kernels.rotary_write_kv import QkNorm

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
ROWS = [(1, 5), (17, 17), (1, 300), (8, 40), (1, 5000), (65, 200)]


@dataclass(frozen=True)
class Outcome:
    """What a check found."""

    name: str
    problem: str | None
    """None where all is well."""


class _Checks:
    """Inputs are made on the CPU and put on the device; results come back and are compared."""

    def __init__(self, kernels: KernelSet, device: torch.device) -> None:
        self.kernels = kernels
        self.device = device
        self.reference = build_kernels("reference")
        self._generator = torch.Generator().manual_seed(0)

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal numbers on the CPU."""
        return torch.randn(shape, generator=self._generator).to(dtype)

    def both(self, call: Callable[[KernelSet, Callable[[Tensor], Tensor]], Any]) -> tuple[Any, Any]:
        """Call with the set on its device and with the reference; inputs are passed through the function given."""
        mine = call(self.kernels, lambda tensor: tensor.clone().to(self.device))
        return _to_cpu(mine), call(self.reference, Tensor.clone)

    def close(self, call: Callable[[KernelSet, Callable[[Tensor], Tensor]], Any], dtype: torch.dtype) -> None:
        """Compare within the dtype's tolerance. Raises AssertionError."""
        mine, theirs = self.both(call)
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)

    def equal(self, call: Callable[[KernelSet, Callable[[Tensor], Tensor]], Any]) -> None:
        """Compare to the bit. Raises AssertionError."""
        mine, theirs = self.both(call)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def _to_cpu(result: Any) -> Any:
    return tuple(map(_to_cpu, result)) if isinstance(result, tuple) else result.cpu()


def _model_ops(checks: _Checks, dtype: torch.dtype) -> None:
    x, residual, weight, bias = (checks.random(37, 1030, dtype=dtype) for _ in range(4))

    def norms(kernels: KernelSet, put: Callable[[Tensor], Tensor]) -> Any:
        kept = put(residual)
        first = kernels.add_rms_norm(put(x), kept, put(weight[0]), 1e-5)
        return first, kernels.add_layer_norm(put(x), kept, put(weight[0]), put(bias[0]), 1e-5), kept

    checks.close(norms, dtype)
    checks.close(lambda kernels, put: kernels.silu_and_mul(put(x)), dtype)
    for tanh in (False, True):
        checks.close(lambda kernels, put, t=tanh: kernels.gelu_and_mul(put(x), tanh=t), dtype)
        checks.close(lambda kernels, put, t=tanh: kernels.gelu(put(x), tanh=t), dtype)
        checks.close(
            lambda kernels, put, t=tanh: kernels.norm_gelu(put(x), put(weight[0]), put(bias[0]), 1e-5, tanh=t), dtype
        )
    checks.close(lambda kernels, put: kernels.pack_linear(put(weight), put(bias[0, :37]))(put(x)), dtype)
    spoilt = x.clone()
    spoilt[3, 1029], spoilt[7, 0] = torch.nan, -torch.inf
    checks.equal(lambda kernels, put: kernels.finite_rows(put(spoilt)))


def _rotary(checks: _Checks, dtype: torch.dtype) -> None:
    for half, has_norm in ((40, False), (20, True), (0, True)):
        qkv, angles = checks.random(9, 13 * 80, dtype=dtype), checks.random(9, half)
        weights = checks.random(2, 80, dtype=dtype)
        slots = torch.randperm(4 * 16)[:9] + 16

        def rotary(kernels: KernelSet, put: Callable[[Tensor], Tensor]) -> Any:
            caches = [put(torch.full((5, 16, 2, 80), torch.nan, dtype=dtype)) for _ in range(2)]
            qk_norm = QkNorm(put(weights[0]), put(weights[1]), 1e-6) if has_norm else None  # noqa: B023
            inputs = put(qkv), put(angles.cos()), put(angles.sin()), put(slots)  # noqa: B023
            return kernels.rotary_write_kv(*inputs, *caches, qk_norm=qk_norm), *caches

        checks.close(rotary, dtype)


def _attention(checks: _Checks, dtype: torch.dtype, rows: list[tuple[int, int]]) -> None:
    query_lens, context_lens = [query for query, _ in rows], [context for _, context in rows]
    for heads, kv_heads, head_dim, window, cap in (
        (9, 3, 64, 0, 0.0),
        (32, 8, 128, 0, 0.0),
        (5, 1, 80, 100, 0.0),
        (16, 2, 256, 700, 30.0),
        (40, 2, 33, 0, 2.0),
    ):
        query = checks.random(sum(query_lens), heads, head_dim, dtype=dtype)
        plain = batch(query_lens, context_lens, torch.device("cpu"))
        # Whatever lies outside the contexts is NaN: the null block, and the rest of each row's last.
        shape = (int(plain.block_tables.max()) + 2, 16, kv_heads, head_dim)
        caches = [torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)]
        for row, context_len in enumerate(context_lens):
            position = torch.arange(context_len)
            slots = plain.block_tables[row, position // 16].long() * 16 + position % 16
            for cache in caches:
                cache.flatten(0, 1)[slots] = checks.random(context_len, kv_heads, head_dim, dtype=dtype)

        def attend(kernels: KernelSet, put: Callable[[Tensor], Tensor]) -> Any:
            placed = put(query)  # noqa: B023
            metadata = batch(query_lens, context_lens, placed.device)
            attention = kernels.plan_attention(metadata, 16)
            return attention(placed, *map(put, caches), head_dim**-0.5, window=window, soft_cap=cap)  # noqa: B023

        checks.close(attend, dtype)


def _sampling(checks: _Checks) -> None:
    rows = 60
    for vocab, rounding in ((700, 0.25), (5000, 0.0), (49_152, 0.0625)):
        logits = checks.random(rows, vocab) * 3
        if rounding:
            logits = (logits / rounding).round() * rounding
        logits[:, 7] = -torch.inf
        pick = torch.arange(rows)
        parameters = {
            "temperature": torch.tensor([0.0, 0.3, 1.0, 2.0])[pick % 4],
            "top_k": torch.tensor([0, 1, 50, 0, 1024])[pick % 5],
            "top_p": torch.tensor([1.0, 0.9, 0.3])[pick % 3],
            "min_p": torch.tensor([0.0, 0.0, 0.05, 1.0])[pick // 3 % 4],
            "typical_p": torch.tensor([1.0, 0.2, 1.0, 0.9])[pick // 5 % 4],
            "uniform": torch.rand(rows, generator=torch.Generator().manual_seed(vocab), dtype=torch.float64),
        }

        def sample(kernels: KernelSet, put: Callable[[Tensor], Tensor]) -> Any:
            placed = {name: put(value) for name, value in parameters.items()}  # noqa: B023
            return kernels.sample_tokens(put(logits), **placed)  # noqa: B023

        checks.equal(sample)


def _logit_changes(checks: _Checks) -> None:
    rows, vocab = 7, 3000
    logits = checks.random(rows, vocab) * 4
    seen = torch.randint(0, vocab, (rows, 300), dtype=torch.int32)
    factors = checks.random(3, rows).abs() + 0.1
    factors[0, ::3] = 1
    lists = {"begins": torch.arange(rows) * 40, "ends": torch.arange(rows) * 40 + 40 - torch.arange(rows)}
    token_ids = torch.cat([torch.randperm(vocab)[:40] for _ in range(rows)])
    values = checks.random(rows * 40) * 1e38

    def change(kernels: KernelSet, put: Callable[[Tensor], Tensor]) -> Any:
        changed = put(logits)
        placed = {name: put(value) for name, value in lists.items()}
        kernels.add_logit_bias(changed, token_ids=put(token_ids), values=put(values), **placed)
        kernels.apply_penalties(
            changed,
            tokens=put(seen),
            slots=put(torch.arange(rows).flip(0)),
            num_prompt_tokens=put(torch.full((rows,), 100)),
            num_tokens=put(torch.full((rows,), 299)),
            repetition=put(factors[0]),
            presence=put(factors[1]),
            frequency=put(factors[2]),
        )
        kernels.forbid_tokens(changed, token_ids=put(token_ids.flip(0)), **placed)
        return changed

    checks.equal(change)
    columns = torch.arange(rows).to(torch.uint64), torch.arange(rows), torch.arange(rows) * 1000
    checks.equal(lambda kernels, put: kernels.uniform(*map(put, columns), 3))
    tied = (logits * 2).round()
    ids = torch.arange(rows)
    checks.equal(lambda kernels, put: kernels.gather_logprobs(put(tied), put(ids), 20)[1])
    checks.close(lambda kernels, put: kernels.gather_logprobs(put(tied), put(ids), 20), torch.float32)


def all_checks(
    kernels: KernelSet, device: torch.device, rows: list[tuple[int, int]]
) -> list[tuple[str, Callable[[], None]]]:
    """Every check and its name; each raises AssertionError. Attention is over rows of query and context tokens."""
    checks = _Checks(kernels, device)
    calls: list[tuple[str, Callable[[], None]]] = []
    for dtype in TOLERANCES:
        of = str(dtype).removeprefix("torch.")
        calls.append((f"norms, activations, linear, finite ({of})", lambda t=dtype: _model_ops(checks, t)))
        calls.append((f"rotary, KV write ({of})", lambda t=dtype: _rotary(checks, t)))
        calls.append((f"attention ({of})", lambda t=dtype: _attention(checks, t, rows)))
    calls.append(("sampling, to the token", lambda: _sampling(checks)))
    calls.append(("bias, penalties, forbidden, noise, logprobs", lambda: _logit_changes(checks)))
    return calls


def check_kernels(kernels: KernelSet, device: torch.device) -> Iterator[Outcome]:
    """Check every op, in every dtype that it has."""
    for name, call in all_checks(kernels, device, ROWS):
        try:
            with torch.inference_mode():
                call()
        except AssertionError as error:
            yield Outcome(name, str(error).strip())
        else:
            yield Outcome(name, None)
