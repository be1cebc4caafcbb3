"""Checks and measures the Triton set on the GPU at hand: gpu_check.py OUT writes JSON, a picture and a table into OUT.

Needs torch from 2.11 built for CUDA and Triton from 3.6, downloads nothing, and takes less than nine minutes, two more
where there are two GPUs: then an executor of two ranks is checked; with one it says that none is. Without a GPU it
makes the checks that need none, says so, and ends with 0.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

import service_rates as services
from gpu_report import draw, table
from kernel_checks import check_kernels
from random_decoder import SHAPES, TINY, RandomDecoder, greedy
from rank_checks import RANKS, rank_problems
from runner_checks import runner_problems
from step_times import as_rows, attention_times, measure_rates, step_times

from executor_svc.device.cuda import open_accelerator
from executor_svc.kernels import KernelSet, build_kernels
from executor_svc.kernels.sets.triton import GpuUnusableError, check_triton, find_gpu

TARGETS = ("sm_80", "sm_90", "gfx942")
TIME_LIMIT = 500.0
"""Seconds after which no further part begins."""
SERVICE_SECONDS = 110.0
"""What a measurement through the services takes, about, with the start of these."""
CLIENTS = (1, 32, 256)


@dataclass
class Report:
    """What is written. `problems` is what makes the check fail."""

    device: str | None = None
    torch: str = torch.__version__
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def say(self, line: str) -> None:
        """Print a line of progress."""
        print(line, flush=True)

    def fail(self, line: str) -> None:
        """Print a problem and keep it."""
        self.problems.append(line)
        self.say(f"  FAILED {line}")

    def note(self, line: str) -> None:
        """Print what is not a problem, and keep it."""
        self.notes.append(line)
        self.say(f"  {line}")


def without_gpu(report: Report) -> None:
    """Compile every kernel ahead of time, for each architecture."""
    try:
        check_triton()
    except GpuUnusableError as error:
        report.fail(str(error))
        return
    report.say("compiling every kernel ahead of time")
    for target in TARGETS:
        command = [sys.executable, str(Path(__file__).with_name("compile_ahead.py")), target]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            report.fail(f"{target}: {done.stderr.strip().splitlines()[-1]}")
            continue
        forms = [json.loads(line) for line in done.stdout.splitlines()]
        if spilled := [form["kernel"] for form in forms if form["spilled_bytes"]]:
            report.fail(f"{target}: registers spilled by {', '.join(spilled)}")
        report.say(f"  {target}: {len(forms)} forms")


def check_results(report: Report, kernels: KernelSet, device: torch.device) -> None:
    """Compare every op with the reference, and greedy tokens with the CPU's in float32."""
    report.say("kernels against the reference")
    for outcome in check_kernels(kernels, device):
        if outcome.problem is None:
            report.say(f"  {outcome.name}")
        else:
            report.fail(f"{outcome.name}: {outcome.problem}")
    report.say("greedy tokens against the CPU's, float32")
    prompts = [[5, 9, 200], list(range(40)), [7], list(range(100, 133))]
    cpu, reference = torch.device("cpu"), build_kernels("reference")
    for seed in range(3):
        tokens = []
        for where, each in ((device, kernels), (cpu, reference)):
            with torch.inference_mode():
                decoder = RandomDecoder(TINY, each, 64, torch.float32, where, seed)
                tokens.append(greedy(decoder, each, prompts, 48, where))
        if tokens[0] != tokens[1]:
            report.fail(f"seed {seed}: the tokens differ: {tokens}")


def check_runner(report: Report, kernels: KernelSet, device: torch.device) -> None:
    """Compare the executor's runner, with graphs and without, with the CPU's."""
    report.say("the runner's tokens against the CPU's, float32")
    with tempfile.TemporaryDirectory() as folder:
        for problem in runner_problems(kernels, open_accelerator(device), Path(folder) / "tiny"):
            report.fail(problem)


def check_ranks(report: Report) -> None:
    """Compare an executor of two ranks, each on a GPU, with the CPU."""
    if (count := torch.cuda.device_count()) < RANKS:
        report.note(f"{RANKS} ranks with NCCL: not checked, as there is {count} GPU; it takes {RANKS}")
        return
    report.say(f"the tokens of {RANKS} ranks with NCCL against the CPU's, float32")
    with tempfile.TemporaryDirectory() as folder:
        for problem in rank_problems(Path(folder), "cuda"):
            report.fail(problem)


def measure_services(report: Report, device: torch.device, deadline: float) -> None:
    """Measure tokens per second through the three services, with graphs and without."""
    report.say("through the three services")
    report.figures["services"] = rows = []
    shape = SHAPES[0]
    with tempfile.TemporaryDirectory() as scratch:
        folder = services.write_model(Path(scratch) / shape.name.lower(), shape, device, torch.bfloat16)
        torch.cuda.empty_cache()
        for graph in (True, False):
            if monotonic() + SERVICE_SECONDS > deadline:
                report.note(f"the time is up: {'with' if graph else 'without'} graphs the services are not measured")
                continue
            logs = Path(scratch) / f"logs-{graph}"
            try:
                rates = asyncio.run(
                    services.service_rates(
                        folder, logs, shape, device="cuda", dtype="bfloat16", graph=graph, clients=CLIENTS
                    )
                )
            except (RuntimeError, OSError) as error:
                report.fail(f"services, {'graphs' if graph else 'no graphs'}: {error}")
                continue
            rows += services.as_rows(rates)
            for each in rates:
                how = "graphs" if each.graph else "launch by launch"
                report.say(f"  {each.clients} clients, {how}: {each.tokens_per_second:.0f} tokens/s")


def measure(report: Report, kernels: KernelSet, device: torch.device, deadline: float) -> None:
    """Time attention and whole steps."""
    report.say("times")
    rates = measure_rates(device)
    report.figures["rates"] = asdict(rates)
    report.say(
        f"  copy {rates.bytes_per_second / 1e9:.0f} GB/s, bfloat16 {rates.operations_per_second / 1e12:.0f} TFLOP/s"
    )
    rows = report.figures["attention"] = []
    for each in attention_times(kernels, rates, device):
        rows.append(asdict(each))
        report.say(f"  attention, {each.rows} x {each.context}: {each.share_of_copy:.0%} of the copy's bandwidth")
    steps = []
    report.figures["steps"] = []
    free_bytes, _ = torch.cuda.mem_get_info(device)
    for step in step_times(kernels, rates, device, free_bytes):
        steps.append(step)
        report.figures["steps"] = as_rows(steps)
        how = "one graph" if step.graph else "kernel by kernel"
        of = f"{step.model} {step.kind}, {step.rows} x {step.tokens // step.rows}, {how}"
        report.say(f"  {of}: {step.device_seconds * 1e3:.2f} ms, {step.over_floor:.2f} of the floor")
        if monotonic() > deadline:
            report.note("the time is up: the steps after this one are not measured")
            break


def run(report: Report, device: torch.device) -> None:
    """Do all that can be done here."""
    started = monotonic()
    try:
        find_gpu(device)
    except GpuUnusableError as error:
        report.note(f"no GPU: {error}")
        without_gpu(report)
        return
    report.device = torch.cuda.get_device_name(device)
    report.say(report.device)
    kernels = build_kernels("triton", device=device)
    parts: list[Callable[[], None]] = [
        lambda: check_results(report, kernels, device),
        lambda: check_runner(report, kernels, device),
        lambda: check_ranks(report),
        lambda: measure_services(report, device, started + TIME_LIMIT),
        lambda: measure(report, kernels, device, started + TIME_LIMIT),
    ]
    for part in parts:
        try:
            with torch.inference_mode():
                part()
        except torch.OutOfMemoryError as error:
            report.fail(f"out of memory: {error}")


def main(folder: Path) -> int:
    """Write the report; return the exit code: 1 where something is wrong."""
    report = Report()
    run(report, torch.device("cuda", 0))
    folder.mkdir(parents=True, exist_ok=True)
    document = asdict(report)
    (folder / "gpu_check.json").write_text(json.dumps(document, indent=2) + "\n")
    if report.figures.get("steps"):
        draw(document, folder / "gpu_check.png")
        (folder / "gpu_check.md").write_text(table(document))
    print(f"{'FAILED' if report.problems else 'all is well'}; written to {folder}")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
