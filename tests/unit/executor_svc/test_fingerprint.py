"""The fingerprint, and what the CPU decides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from executor_svc.cpu_features import cpu_features, resolve_dtype
from executor_svc.fingerprint import fingerprint
from executor_svc.kernels import build_kernels

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_fingerprint_is_stable_and_tells_differences() -> None:
    """The same parts give the same sha256; every single part that differs gives another."""
    base = {"model_revision": "a", "dtype": torch.float32, "kernels": "cpu", "tensor_parallel_size": 1}
    changes = [
        {},
        {"model_revision": "b"},
        {"dtype": torch.bfloat16},
        {"kernels": "reference"},
        {"tensor_parallel_size": 2},
    ]
    hashes = [fingerprint(**(base | change)) for change in changes]  # type: ignore[arg-type]
    assert len(set(hashes)) == len(changes)
    assert hashes == [fingerprint(**(base | change)) for change in changes]  # type: ignore[arg-type]
    assert all(len(each) == 64 and set(each) <= set("0123456789abcdef") for each in hashes)


def test_the_build_of_a_set_tells_its_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines that compute with other instructions have kernels of other builds, and so other fingerprints."""
    here = {name: build_kernels(name).build for name in ("reference", "cpu")}
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "Z80")
    monkeypatch.setenv("OCTAVO_CPU_ISA", "generic")
    there = {name: build_kernels(name).build for name in ("reference", "cpu")}
    assert not set(here.values()) & set(there.values())
    assert "-generic-" in there["cpu"]


def test_cpu_features_are_read_from_cpuinfo(tmp_path: Path) -> None:
    """x86 lists flags, Arm lists Features; only what numeric code is chosen by is kept; no file, no features."""
    assert cpu_features(tmp_path) == frozenset()
    (tmp_path / "proc").mkdir()
    cpuinfo = tmp_path / "proc/cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu sse2 avx2 avx512_bf16 amx_bf16\nbugs\t: none\n")
    assert cpu_features(tmp_path) == {"avx2", "avx512_bf16", "amx_bf16"}
    cpuinfo.write_text("processor\t: 0\nFeatures\t: fp asimd bf16 crc32\n")
    assert cpu_features(tmp_path) == {"asimd", "bf16"}


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        (set(), torch.float32),
        ({"avx2", "avx512f"}, torch.float32),
        ({"avx512_bf16"}, torch.bfloat16),
        ({"amx_bf16"}, torch.bfloat16),
        ({"bf16"}, torch.bfloat16),
    ],
)
def test_auto_dtype_is_bfloat16_where_the_cpu_multiplies_it(features: set[str], expected: torch.dtype) -> None:
    """Auto follows the CPU; a name that is given is taken at its word on any CPU."""
    assert resolve_dtype("auto", CPU, frozenset(features)) == expected
    assert resolve_dtype("auto", GPU, frozenset(features)) == torch.bfloat16
    assert resolve_dtype("float32", CPU, frozenset(features)) == torch.float32
    assert resolve_dtype("bfloat16", CPU, frozenset(features)) == torch.bfloat16
    with pytest.raises(ValueError, match="unknown dtype 'int4'"):
        resolve_dtype("int4", CPU, frozenset(features))
