"""How a model is loaded: side by side, with its progress told, and the library before its import."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from factories import make_llama
from paged import PagedLoop, PagedSequence
from safetensors.torch import load_file

from executor_svc.kernels import build_kernels
from executor_svc.models import load_weights
from executor_svc.weights import WeightsError
from executor_svc.weights.hf_folder import HfFolder


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    """A tiny model."""
    return make_llama(tmp_path / "tiny", num_layers=4)


def test_several_threads_load_what_one_loads(folder: Path) -> None:
    """The logits are bit-equal, and torch has as many threads afterwards as before."""
    before = torch.get_num_threads()
    logits = []
    try:
        for num_threads in (1, 4):
            torch.set_num_threads(num_threads)
            model = load_weights(folder, torch.float32, torch.device("cpu"), build_kernels("cpu"))
            assert torch.get_num_threads() == num_threads
            torch.set_num_threads(1)
            logits.append(PagedLoop(model).step([(PagedSequence([5, 6, 7]), 3)]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*logits)


def test_progress_rises_to_the_number_of_elements(folder: Path) -> None:
    """Every tensor of the model counts once; what is told never falls, and ends at the total."""
    told: list[tuple[int, int]] = []
    load_weights(
        folder,
        torch.float32,
        torch.device("cpu"),
        build_kernels("cpu"),
        lambda done, total: told.append((done, total)),
    )
    tensors = load_file(folder / "model.safetensors")
    total = sum(tensor.numel() for tensor in tensors.values())
    assert told == sorted(told)
    assert len(told) == len(tensors)
    assert {each[1] for each in told} == {total}
    assert told[-1] == (total, total)


def test_an_error_in_one_layer_ends_the_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches the caller as it is, and the threads that load are gone."""
    copy_to = HfFolder.copy_to

    def failing(self: HfFolder, name: str, out: torch.Tensor) -> None:
        if name == "model.layers.2.mlp.up_proj.weight":
            raise WeightsError(name)
        copy_to(self, name, out)

    monkeypatch.setattr(HfFolder, "copy_to", failing)
    with pytest.raises(WeightsError, match=r"layers\.2"):
        load_weights(folder, torch.float32, torch.device("cpu"), build_kernels("cpu"))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


def test_the_library_is_loaded_before_torch_is_imported() -> None:
    """The process maps it without torch, and torch then works; a torch without it is left to its import."""
    code = """
import sys
from pathlib import Path
from executor_svc import preload
thread = preload.preload_torch()
thread.join()
assert "torch" not in sys.modules
assert preload.LIBRARY in Path("/proc/self/maps").read_text()
import torch
assert torch.ones(2).sum().item() == 2
preload.LIBRARY = "libnone.so"
assert preload.preload_torch() is None
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
