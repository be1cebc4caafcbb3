"""What `make gpu-check` runs on a GPU, tried out without one: its comparisons interpreted, its model on CPUs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from fake_device import FakeDevice

from executor_svc.kernels import KernelSet, build_kernels

FOLDER = Path(__file__).parents[2] / "gpu"
CPU = torch.device("cpu")


_SLOW = ("norms", "attention", "bias")
"""Interpreted, these take ten to thirty seconds each."""


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    import gpu_check

    return gpu_check


@pytest.mark.parametrize("name", ["rotary", *(pytest.param(op, marks=pytest.mark.full) for op in _SLOW)])
def test_its_comparisons_pass_and_can_fail(gpu_check: ModuleType, triton_set: KernelSet, name: str) -> None:
    """The interpreted set passes them; a set whose ops are off fails every one of them."""
    from dataclasses import replace

    from kernel_checks import all_checks

    def wrong(*arguments: torch.Tensor, **named: object) -> torch.Tensor:
        return torch.zeros_like(arguments[0])

    broken = replace(
        triton_set,
        silu_and_mul=wrong,
        rotary_write_kv=wrong,
        plan_attention=lambda *_: wrong,
        add_logit_bias=lambda *_, **__: None,
    )
    rows = [(1, 5), (9, 20), (1, 300)]
    for kernels, passes in ((triton_set, True), (broken, False)):
        checks = [call for label, call in all_checks(kernels, CPU, rows) if label.startswith(name)]
        assert checks
        for check in checks[:1] if name == "attention" else checks:
            if passes:
                check()
            else:
                with pytest.raises((AssertionError, AttributeError)):
                    check()


def test_its_model_decodes_alike_with_two_sets(gpu_check: ModuleType) -> None:
    """Prefill and decode by the reference and by the compiled kernels give the same tokens, more than one of them."""
    from random_decoder import TINY, RandomDecoder, greedy

    prompts = [[5, 9, 200], list(range(40))]
    tokens = []
    for name in ("reference", "cpu"):
        kernels = build_kernels(name)
        with torch.inference_mode():
            decoder = RandomDecoder(TINY, kernels, 16, torch.float32, CPU)
            tokens.append(greedy(decoder, kernels, prompts, 20, CPU))
    assert tokens[0] == tokens[1]
    assert len(set(tokens[0][0])) > 3


def test_its_runner_is_compared_token_by_token(gpu_check: ModuleType, tmp_path: Path) -> None:
    """Launched one by one the tokens are the CPU's; graphs that hold nothing, as a device has that is not watched, are
    found out.
    """
    from runner_checks import runner_problems

    with torch.inference_mode():
        problems = list(runner_problems(build_kernels("reference"), FakeDevice(), tmp_path / "tiny"))
    assert problems
    assert all(problem.startswith("runner with graphs, ") for problem in problems)


@pytest.mark.parametrize(("count", "is_checked"), [(1, False), (2, True)])
def test_ranks_are_checked_where_there_are_two_gpus(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, count: int, is_checked: bool
) -> None:
    """With one it says that they are not; with two what goes wrong makes the check fail."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(gpu_check, "rank_problems", lambda folder, device: [f"2 ranks on {device}: a token"])
    report = gpu_check.Report()
    gpu_check.check_ranks(report)
    if is_checked:
        assert (report.problems, report.notes) == (["2 ranks on cuda: a token"], [])
    else:
        assert report.problems == []
        assert report.notes == ["2 ranks with NCCL: not checked, as there is 1 GPU; it takes 2"]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_its_ranks_are_compared_token_by_token(gpu_check: ModuleType, tmp_path: Path) -> None:
    """Tried out on CPUs: rank 0 as the check runs it and rank 1 as an executor starts it write the right tokens."""
    from rank_checks import rank_problems

    assert rank_problems(tmp_path, "cpu") == []


@pytest.mark.full
def test_its_services_serve(gpu_check: ModuleType, tmp_path: Path) -> None:
    """A random model is written, prepared and served by three processes, and every client gets all its tokens."""
    import asyncio
    from dataclasses import replace

    from random_decoder import TINY
    from service_rates import as_rows, service_rates, write_model

    shape = replace(TINY, intermediate=96)
    folder = write_model(tmp_path / "tiny", shape, CPU, torch.float32)
    flags = {"kv_memory": "16MiB", "threads": "1"}
    rates = asyncio.run(
        service_rates(
            folder,
            tmp_path / "logs",
            shape,
            device="cpu",
            dtype="float32",
            graph=True,
            clients=(1, 3),
            new_tokens=8,
            flags=flags,
        )
    )
    assert [(each["clients"], each["tokens"]) for each in as_rows(rates)] == [(1, 8), (3, 24)]
    assert all(each.tokens_per_second > 0 and each.first_token_seconds > 0 for each in rates)


def test_without_a_gpu_it_says_so_and_ends_well(
    gpu_check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is printed and written, the checks that need no GPU are made, and the exit code is 0."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(gpu_check, "TARGETS", ())  # test_triton_builds compiles
    assert gpu_check.main(tmp_path) == 0
    assert "no GPU: torch" in capsys.readouterr().out
    document = json.loads((tmp_path / "gpu_check.json").read_text())
    assert (document["device"], document["problems"], document["figures"]) == (None, [], {})
    assert document["notes"][0].startswith("no GPU: ")


def test_its_picture_and_table_show_every_figure(gpu_check: ModuleType, tmp_path: Path) -> None:
    """A report's steps and attention times are all in the table, and the picture is one."""
    from gpu_report import draw, table

    step = {"model": "Llama-1B", "kind": "decode", "rows": 8, "tokens": 8, "graph": True, "device_seconds": 0.00123}
    step |= {"host_seconds": 0.00150, "floor_seconds": 0.001, "over_floor": 1.23}
    attention = {"rows": 8, "context": 4096, "device_seconds": 0.0005, "share_of_copy": 0.87}
    rates = {"bytes_per_second": 3e12, "operations_per_second": 7e14}
    service = {"model": "Llama-1B", "graph": False, "clients": 32, "tokens_per_second": 1234.5}
    service |= {"first_token_seconds": 0.021}
    document = {
        "device": "a card",
        "torch": "2.13.0",
        "figures": {"rates": rates, "steps": [step], "attention": [attention], "services": [service]},
    }
    text = table(document)
    assert "| Llama-1B, 32 clients | kernel by kernel | 1234 | 21 |" in text
    assert "| Llama-1B decode 8 x 1 | one graph | 1.23 | 1.50 | 1.00 | 1.23 |" in text
    assert "| 8 x 4096 | 0.500 | 87% |" in text
    draw(document, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_floor_counts_what_a_step_moves_and_computes(gpu_check: ModuleType) -> None:
    """One row is bound by its bytes, a long prompt by its operations: both as worked out by hand for the tiny model."""
    from random_decoder import TINY, RandomDecoder
    from step_times import Rates, _floor

    decoder = RandomDecoder(TINY, build_kernels("reference"), 4, torch.float32, CPU)
    weights = 2 * (48 * (4 + 2 * 2) * 16 + 64 * 48 + 3 * 48 * 80) + 48 * 320
    assert decoder.weight_bytes == 4 * weights
    assert _floor(decoder, Rates(1.0, 1e30), [1], [7]) == 4 * weights + 7 * 4 * 2 * 2 * 2 * 16
    products = 2 * (3 * (weights - 48 * 320) + 48 * 320)
    assert _floor(decoder, Rates(1e30, 1.0), [3], [5]) == products + 4 * (3 + 4 + 5) * 4 * 16 * 2
