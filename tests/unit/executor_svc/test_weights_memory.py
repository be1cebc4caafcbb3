"""How much memory loading takes beyond the weights themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from factories import make_llama
from gguf_models import make_gguf

MOST_SHARE = 1.2
"""Peak of the resident memory while loading, beyond what the process had before, over the bytes of the weights as they
are held, which are the kernels' packed panels (16 bits an element where no float32 element needs more).
"""
_SCRIPT = """
import sys
from pathlib import Path
import torch
from executor_svc.kernels import build_kernels
from executor_svc.models import load_weights
from dataclasses import replace

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

small, path, dtype = Path(sys.argv[1]), Path(sys.argv[2]), getattr(torch, sys.argv[3])
kernels = build_kernels("cpu", 2)
torch.set_num_threads(2)
# What a first load imports and allocates for good is not the weights'.
load_weights(small, dtype, torch.device("cpu"), kernels)
held = 0

def pack(weight, bias):
    global held
    packed = kernels.pack_linear(weight, bias)
    held += packed.panels.nbytes
    return packed

counting = replace(kernels, pack_linear=pack)
before = status("VmRSS:")
Path("/proc/self/clear_refs").write_text("5")  # from here on VmHWM is the peak of the load alone
model = load_weights(path, dtype, torch.device("cpu"), counting)
print(before, status("VmHWM:"), held)
"""


def _share(small: Path, path: Path, dtype: str) -> float:
    command = [sys.executable, "-c", _SCRIPT, str(small), str(path), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    before, peak, held = map(int, done.stdout.split())
    assert held > 60 << 20
    print(f"{path.name} as {dtype}: {(peak - before) / held:.3f} of {held >> 20} MiB")
    return (peak - before) / held


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a tiny model, and one of 80 million elements whose embedding is a twentieth of it, in two shards."""
    folder = tmp_path_factory.mktemp("models")
    large = make_llama(
        folder / "large",
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_layers=24,
        num_heads=8,
        tie=True,
        dtype=torch.bfloat16,
        num_shards=2,
    )
    return make_llama(folder / "small", dtype=torch.bfloat16), large


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.full)])
def test_a_folder_loads_in_little_more_than_its_weights(folders: tuple[Path, Path], dtype: str) -> None:
    """Neither the mapped files nor a second copy of the weights stays in memory, converted or not."""
    small, large = folders
    assert _share(small, large, dtype) < MOST_SHARE


@pytest.mark.full
@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_1"])
def test_a_gguf_file_loads_in_little_more_than_its_weights(
    folders: tuple[Path, Path], tmp_path: Path, quantization: str
) -> None:
    """The same of a packed file, whose tensors are unpacked block by block."""
    small = make_llama(tmp_path / "small")
    large = make_llama(
        tmp_path / "large",
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_layers=24,
        num_heads=8,
        tie=True,
    )
    path = make_gguf(large, tmp_path / "large.gguf", quantization=quantization)
    assert _share(make_gguf(small, tmp_path / "small.gguf"), path, "float32") < MOST_SHARE
