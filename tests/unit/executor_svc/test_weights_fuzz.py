"""Damaged files of weights: whatever bytes they hold, reading them ends in a ModelLoadError or in tensors."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_families import GGUF_FAMILIES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from executor_svc.weights import Checkpoint, ModelLoadError, WeightsError, open_checkpoint
from executor_svc.weights.safetensors_file import SafetensorsFile

_REUSED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
_MOST_MEMORY = 16 << 20
"""Bytes that Python may take for a file of a few kilobytes."""


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a small GGUF file with routed experts, so that every kind of tensor is in it."""
    folder = tmp_path_factory.mktemp("gguf")
    family = GGUF_FAMILIES["qwen3 moe"]
    return family.write(family.make(folder / "model"), folder / "model.gguf", quantization="Q8_0").read_bytes()


@pytest.fixture(scope="module")
def safetensors_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a small safetensors file of the three element types."""
    path = tmp_path_factory.mktemp("safetensors") / "model.safetensors"
    kinds = {"a": torch.float32, "b": torch.float16, "c": torch.bfloat16}
    save_file({name: torch.ones(3, 4, dtype=dtype) for name, dtype in kinds.items()}, path)
    return path.read_bytes()


def _changed(data: bytes, at: int, new: bytes, keep: int | None) -> bytes:
    """Return `data` with some bytes in place of those at a share of its length, cut to a share."""
    at %= len(data)
    changed = data[:at] + new + data[at + len(new) :]
    return changed if keep is None else changed[: keep % (len(data) + 1)]


def _copy_all(file: Checkpoint | SafetensorsFile) -> None:
    for name, shape in file.shapes.items():
        if name not in file.unreadable:
            file.copy_to(name, torch.empty(shape))


def _refusal(read: Callable[[], None]) -> str | None:
    """Return what a file is refused with; None where it is read. Any other error is raised."""
    try:
        read()
    except ModelLoadError as error:
        return str(error)
    return None


_DAMAGE: dict[str, Any] = {
    "at": st.integers(0, 1 << 20) | st.integers(0, 4096),
    "new": st.binary(min_size=1, max_size=16) | st.sampled_from([b"\xff" * 8, b"\0" * 8, b"\xff" * 4]),
    "keep": st.none() | st.integers(0, 1 << 20),
}


@_REUSED
@given(**_DAMAGE)
def test_a_damaged_gguf_file_loads_or_is_refused(
    gguf_bytes: bytes, tmp_path: Path, at: int, new: bytes, keep: int | None
) -> None:
    """Bytes changed or cut anywhere: every tensor can be copied or a ModelLoadError names the file."""
    path = tmp_path / "model.gguf"
    path.write_bytes(_changed(gguf_bytes, at, new, keep))
    tracemalloc.start()
    try:
        refusal = _refusal(lambda: _copy_all(open_checkpoint(path)))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refusal is None or "model.gguf" in refusal
    assert most < _MOST_MEMORY


@_REUSED
@given(**_DAMAGE)
def test_a_damaged_safetensors_file_loads_or_is_refused(
    safetensors_bytes: bytes, tmp_path: Path, at: int, new: bytes, keep: int | None
) -> None:
    """Bytes changed or cut anywhere: every tensor can be copied or a WeightsError names the file."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(_changed(safetensors_bytes, at, new, keep))
    refusal = _refusal(lambda: _copy_all(SafetensorsFile(path)))
    assert refusal is None or "model.safetensors" in refusal


@_REUSED
@given(
    header=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "a", "__metadata__"]), inner)
        ),
        max_leaves=12,
    ),
    data=st.binary(max_size=16),
)
def test_any_json_header_is_read_or_refused(tmp_path: Path, header: Any, data: bytes) -> None:
    """A header of any JSON, however unlike a header, is a WeightsError or tensors."""
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    refusal = _refusal(lambda: _copy_all(SafetensorsFile(path)))
    assert refusal is None or "model.safetensors" in refusal


def _header(**tensors: Any) -> bytes:
    """Return a safetensors file of a header and 64 bytes of data."""
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text + bytes(64)


def _tensor(start: int, end: int, *shape: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"1234", "has 4 bytes, too few for a header"),
        ((1 << 60).to_bytes(8, "little") + b"{}", "header of 1152921504606846976 bytes is longer than the file"),
        ((4).to_bytes(8, "little") + b"nope", "its header is no JSON"),
        ((2).to_bytes(8, "little") + b"[]", "its header is no JSON object"),
        ((90_000).to_bytes(8, "little") + b"[" * 90_000, "its header is no JSON"),
        (_header(a=_tensor(0, 64, 4, 4), b=3), "tensor b has no proper dtype"),
        (_header(a=_tensor(0, 32, 8), b=_tensor(16, 64, 12)), "tensor b overlaps a"),
        (_header(a=_tensor(0, 16, 4), b=_tensor(32, 64, 8)), "tensor b leaves a gap behind a"),
        (_header(a=_tensor(0, 32, 8)), "32 bytes behind a belong to no tensor"),
        (_header(a=_tensor(0, 128, 32)), "tensor a lies at bytes .* past the file's"),
        (_header(a=_tensor(64, 0, 16)), "tensor a lies at bytes"),
        (_header(a=_tensor(0, 64, 5)), r"tensor a, F32 of shape \[5\], does not take the 64 bytes"),
        (_header(a=_tensor(0, 64, -4, -4)), "tensor a has no proper dtype, shape"),
        (b'{"a":1,"a":2}', "its header names 'a' twice"),
    ],
)
def test_faults_of_a_safetensors_header_are_named(tmp_path: Path, data: bytes, message: str) -> None:
    """Each kind of fault is an error with the file and the tensor."""
    if data.startswith(b"{"):
        data = len(data).to_bytes(8, "little") + data
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(WeightsError, match=rf"model\.safetensors is damaged or incomplete: .*{message}"):
        SafetensorsFile(path)


def test_tensors_off_their_alignment_are_read(tmp_path: Path) -> None:
    """A header of any length is allowed, so tensors may lie at odd bytes."""
    values = torch.arange(12.0).view(3, 4)
    text = json.dumps({"x": _tensor(0, 48, 3, 4)}).encode()
    text += b" " * ((len(text) + 1) % 2)
    assert (8 + len(text)) % 2 == 1
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + values.numpy().tobytes())
    out = torch.empty(3, 4)
    SafetensorsFile(path).copy_to("x", out)
    assert torch.equal(out, values)


def test_a_scalar_and_an_empty_tensor_are_read(tmp_path: Path) -> None:
    """Shapes without rows and without dimensions are tensors too."""
    path = tmp_path / "model.safetensors"
    save_file({"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4)}, path)
    file = SafetensorsFile(path)
    out = torch.empty(())
    file.copy_to("scalar", out)
    file.copy_to("empty", torch.empty(0, 4))
    assert out.item() == 3.5
