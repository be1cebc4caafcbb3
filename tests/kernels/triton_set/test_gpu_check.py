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


def _pipeline_row(rows: int, **changed: object) -> dict[str, object]:
    row = {"model": "Llama-1B", "rows": rows, "context": 1024, "sampling": "greedy", "graph": True}
    times = {"step_seconds": 0.00131, "device_seconds": 0.00125, "idle_seconds": 0.00001, "prepare_seconds": 0.0004}
    return row | times | {"floor_seconds": 0.001, "over_floor": 1.31, "outside_seconds": 0.00006} | changed


_ATTENTION = {"rows": 8, "context": 4096, "device_seconds": 0.0005, "share_of_copy": 0.87}


def test_its_picture_and_table_show_every_figure(gpu_check: ModuleType, tmp_path: Path) -> None:
    """All figures of a report are in the table, and the picture is one; what is missing is left out."""
    from gpu_report import draw, table

    step = {"model": "Llama-1B", "kind": "decode", "rows": 8, "tokens": 8, "graph": True, "device_seconds": 0.00123}
    step |= {"host_seconds": 0.00150, "floor_seconds": 0.001, "over_floor": 1.23}
    rates = {"bytes_per_second": 3e12, "operations_per_second": 7e14}
    service = {"model": "Llama-1B", "graph": False, "clients": 32, "tokens_per_second": 1234.5}
    service |= {"first_token_seconds": 0.021}
    figures = {"rates": rates, "steps": [step], "attention": [_ATTENTION], "services": [service]}
    figures["pipeline"] = [_pipeline_row(8), _pipeline_row(64, graph=False)]
    document = {"device": "a card", "torch": "2.13.0", "triton": "3.7.1", "figures": figures}
    text = table(document)
    assert text.startswith("a card, torch 2.13.0, Triton 3.7.1.\n\nCopy 3000 GB/s, bfloat16 products 700 TFLOP/s.\n")
    assert "| Llama-1B, 32 clients | kernel by kernel | 1234 | 21 |" in text
    assert "| Llama-1B decode 8 x 1 | graphs | 1.23 | 1.50 | 1.00 | 1.23 |" in text
    assert "| Llama-1B 8 x 1024 | greedy | graphs | 1.310 | 1.250 | 0.060 | 0.400 | 1.000 | 1.31 |" in text
    assert "| 8 x 4096 | 0.500 | 87% |" in text
    assert "| a step of Llama-1B over the floor, 1 to 64 rows | 1.3 or less | 1.31 | 8 rows | no |" in text
    draw(document, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    bare = table(document | {"figures": {}})
    assert bare == "a card, torch 2.13.0, Triton 3.7.1.\n"


def test_goals_are_held_against_the_worst_figure(gpu_check: ModuleType) -> None:
    """Of attention the lowest share; of each model's greedy graphs up to 64 rows the highest times."""
    from goals import goals

    attention = [_ATTENTION, _ATTENTION | {"rows": 1, "share_of_copy": 0.849}]
    steps = [
        _pipeline_row(1, over_floor=1.2),
        _pipeline_row(64, over_floor=1.29, outside_seconds=0.00021),
        _pipeline_row(256, over_floor=3.0, outside_seconds=0.1),
        _pipeline_row(8, over_floor=3.0, outside_seconds=0.1, graph=False),
        _pipeline_row(8, over_floor=3.0, outside_seconds=0.1, sampling="top_p"),
    ]
    found = [(each.found, each.where, each.met) for each in goals({"attention": attention, "pipeline": steps})]
    assert found == [("84.9%", "1 x 4096", False), ("1.29", "64 rows", True), ("0.210 ms", "64 rows", False)]
    assert list(goals({})) == []


def test_its_steps_are_the_executors(gpu_check: ModuleType) -> None:
    """Decode goes through the pipelined runner with two steps in flight, as graphs and without; each step is told its
    time and its floor.
    """
    from pipeline_times import bytes_needed, load, make_limits, pipeline_times, profile_of
    from random_decoder import TINY
    from step_times import Rates, floor_seconds

    device, rates = FakeDevice(), Rates(1e9, 1e12)
    with torch.inference_mode(), device.watching():
        kernels = device.watch.kernels(build_kernels("reference"))
        with device.watch.unwatched():
            model = load(TINY, kernels, torch.float32, device)
        profile = profile_of(model, kernels, make_limits(TINY, (1, 3), 40, 20), device)
        times = [
            *pipeline_times(model, TINY, kernels, rates, device, batches=(1, 3), context=40, num_steps=20),
        ]
    kinds = [(each.rows, each.sampling, each.graph) for each in times]
    graphs = [(1, "greedy", True), (3, "greedy", True), (1, "top_p", True), (3, "top_p", True)]
    assert kinds == [*graphs, (1, "greedy", False), (3, "greedy", False)]
    for each in times:
        assert each.floor_seconds == floor_seconds(TINY, 4, rates, [1] * each.rows, [50] * each.rows)
        assert each.over_floor == each.step_seconds / each.floor_seconds > 0
        assert each.device_seconds > 0
        assert each.prepare_seconds > 0
    assert profile.step > 0
    assert bytes_needed(TINY, torch.float32, (1, 3)) > TINY.weight_bytes(4)


def test_a_part_that_fails_stops_no_other(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it ran into is a problem; what was found before it and after it is written, also while parts still run."""
    monkeypatch.setattr(gpu_check, "find_gpu", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(gpu_check, "build_kernels", lambda name, device: None)
    monkeypatch.setattr(gpu_check, "open_accelerator", lambda device: FakeDevice())
    written: list[list[str]] = []

    def fails(*arguments: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def finds(report: object, *arguments: object) -> None:
        written.append(json.loads((tmp_path / "gpu_check.json").read_text())["problems"])
        report.figures["attention"] = [_ATTENTION]  # type: ignore[attr-defined]

    for name in ("check_results", "measure_pipeline", "measure_steps"):
        monkeypatch.setattr(gpu_check, name, fails)
    for name in ("check_runner", "check_ranks"):
        monkeypatch.setattr(gpu_check, name, lambda *arguments: None)
    monkeypatch.setattr(gpu_check, "measure_attention", finds)
    # A package that is not there.
    monkeypatch.setitem(sys.modules, "service_rates", None)
    assert gpu_check.main(tmp_path) == 1
    document = json.loads((tmp_path / "gpu_check.json").read_text())
    failed = [problem.split(":")[0] for problem in document["problems"]]
    assert failed == ["kernels", "pipeline", "steps"]
    assert len(written[0]) == 1
    assert document["notes"] == ["the services are not measured: service_rates is not installed"]
    parts = ["kernels", "runner", "ranks", "attention", "pipeline", "services", "steps"]
    assert list(document["figures"]["seconds"]) == parts
    assert "| 8 x 4096 | 0.500 | 87% |" in (tmp_path / "gpu_check.md").read_text()
    assert (
        "decode attention, of the copy's bandwidth: 87.0% (8 x 4096), wanted 85% or more: yes"
        in capsys.readouterr().out
    )


def test_the_floor_counts_what_a_step_moves_and_computes(gpu_check: ModuleType) -> None:
    """One row is bound by its bytes, a long prompt by its operations: both as worked out by hand for the tiny model."""
    from random_decoder import TINY
    from step_times import Rates, floor_seconds

    weights = 2 * (48 * (4 + 2 * 2) * 16 + 64 * 48 + 3 * 48 * 80) + 48 * 320
    assert TINY.weight_bytes(4) == 4 * weights
    assert floor_seconds(TINY, 4, Rates(1.0, 1e30), [1], [7]) == 4 * weights + 7 * 4 * 2 * 2 * 2 * 16
    products = 2 * (3 * (weights - 48 * 320) + 48 * 320)
    assert floor_seconds(TINY, 4, Rates(1e30, 1.0), [3], [5]) == products + 4 * (3 + 4 + 5) * 4 * 16 * 2
