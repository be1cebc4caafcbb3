"""Checks and measures the Triton set on the GPU at hand: gpu_check.py OUT writes JSON, a picture and a table into OUT.

Needs torch from 2.11 built for CUDA and Triton from 3.6, downloads nothing, and takes less than nine minutes, two more
where there are two GPUs: then an executor of two ranks is checked; with one it says that none is. Without a GPU it
makes the checks that need none, says so, and ends with 0.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

import pipeline_times as pipeline
from goals import goals
from gpu_report import draw, table
from kernel_checks import check_kernels
from random_decoder import SHAPES, TINY, RandomDecoder, greedy
from rank_checks import RANKS, rank_problems
from runner_checks import runner_problems
from step_times import Rates, as_rows, attention_times, measure_rates, step_times

from executor_svc.device import Device, DeviceUnusableError
from executor_svc.device.cuda import open_accelerator
from executor_svc.kernels import KernelSet, build_kernels
from executor_svc.kernels.sets.triton import GpuUnusableError, check_triton, find_gpu, triton_version

TARGETS = ("sm_80", "sm_90", "gfx942")
TIME_LIMIT = 500.0
"""Seconds after which no further part begins."""
SERVICE_SECONDS = 110.0
"""What a measurement through the services takes, about, with the start of these."""
PIPELINE_SECONDS = 60.0
"""What one of the executor's steps of a model takes, about, with the compiler and the captures."""
CLIENTS = (1, 32, 256)


@dataclass
class Report:
    """What is written. `problems` is what makes the check fail."""

    device: str | None = None
    torch: str = torch.__version__
    triton: str = ""
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


def check_runner(report: Report, kernels: KernelSet, device: Device) -> None:
    """Compare the executor's runner, with graphs and without, with the CPU's."""
    report.say("the runner's tokens against the CPU's, float32")
    with tempfile.TemporaryDirectory() as folder:
        for problem in runner_problems(kernels, device, Path(folder) / "tiny"):
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
    try:
        import service_rates as services
    except ModuleNotFoundError as error:
        report.note(f"the services are not measured: {error.name} is not installed")
        return
    report.figures["services"] = rows = []
    shape = SHAPES[0]
    with tempfile.TemporaryDirectory() as scratch:
        folder = services.write_model(Path(scratch) / shape.name.lower(), shape, device, torch.bfloat16)
        release_memory()
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


def measure_attention(report: Report, kernels: KernelSet, device: torch.device) -> None:
    """Measure what the card does at best, and decode attention against it."""
    report.say("the card, and decode attention")
    rates = measure_rates(device)
    report.figures["rates"] = asdict(rates)
    report.say(
        f"  copy {rates.bytes_per_second / 1e9:.0f} GB/s, bfloat16 {rates.operations_per_second / 1e12:.0f} TFLOP/s"
    )
    rows = report.figures["attention"] = []
    for each in attention_times(kernels, rates, device):
        rows.append(asdict(each))
        report.say(f"  attention, {each.rows} x {each.context}: {each.share_of_copy:.0%} of the copy's bandwidth")


def measure_pipeline(report: Report, kernels: KernelSet, device: Device, deadline: float) -> None:
    """Time the executor's decode steps with two in flight: the goals are set for these."""
    report.say("the executor's decode steps, two in flight")
    rates = Rates(**report.figures["rates"])
    times: list[pipeline.PipelineTime] = []
    report.figures["profiles"] = profiles = {}
    for shape in SHAPES:
        release_memory()
        needed, free = pipeline.bytes_needed(shape, torch.bfloat16), device.memory().free
        if needed > 0.85 * free:
            report.note(f"{shape.name} needs {needed >> 20} MiB of the {free >> 20} MiB that are free: not measured")
            continue
        if monotonic() + PIPELINE_SECONDS > deadline:
            report.note(f"the time is up: the executor's steps of {shape.name} are not measured")
            continue
        started = monotonic()
        model = pipeline.load(shape, kernels, torch.bfloat16, device)
        limits = pipeline.make_limits(shape, pipeline.BATCHES, pipeline.CONTEXT)
        profile = pipeline.profile_of(model, kernels, limits, device)
        profiles[shape.name] = asdict(profile)
        report.say(f"  {shape.name}: {profile.account(0.9)}; loaded and measured in {monotonic() - started:.0f} s")
        for each in pipeline.pipeline_times(model, shape, kernels, rates, device):
            times.append(each)
            report.figures["pipeline"] = pipeline.as_rows(times)
            how = f"{each.sampling}, {'graphs' if each.graph else 'launch by launch'}"
            report.say(
                f"  {each.rows} rows, {how}: {each.step_seconds * 1e3:.3f} ms, {each.over_floor:.2f} of the floor, "
                f"{each.outside_seconds * 1e3:.3f} ms outside kernels"
            )
        del model


def measure_steps(report: Report, kernels: KernelSet, device: torch.device, deadline: float) -> None:
    """Time decode and prefill of a model made of the kernels alone, kernel by kernel and as one graph."""
    report.say("the model's steps alone")
    rates, steps = Rates(**report.figures["rates"]), []
    release_memory()
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


def release_memory() -> None:
    """Give the device what nobody holds any more."""
    gc.collect()
    torch.cuda.empty_cache()


def run(report: Report, torch_device: torch.device, write: Callable[[], None]) -> None:
    """Do all that can be done here. `write`: called after each part, as the next one may never end."""
    started = monotonic()
    try:
        find_gpu(torch_device)
    except GpuUnusableError as error:
        report.note(f"no GPU: {error}")
        without_gpu(report)
        return
    report.device = torch.cuda.get_device_name(torch_device)
    report.say(report.device)
    deadline = started + TIME_LIMIT
    try:
        kernels, device = build_kernels("triton", device=torch_device), open_accelerator(torch_device)
    except (GpuUnusableError, DeviceUnusableError) as error:
        report.fail(str(error))
        return
    parts: dict[str, Callable[[], None]] = {
        "kernels": lambda: check_results(report, kernels, torch_device),
        "runner": lambda: check_runner(report, kernels, device),
        "ranks": lambda: check_ranks(report),
        "attention": lambda: measure_attention(report, kernels, torch_device),
        "pipeline": lambda: measure_pipeline(report, kernels, device, deadline),
        "services": lambda: measure_services(report, torch_device, deadline),
        "steps": lambda: measure_steps(report, kernels, torch_device, deadline),
    }
    for name, part in parts.items():
        began = monotonic()
        try:
            with torch.inference_mode():
                part()
        except Exception as error:
            # Whatever one part runs into, the others are to be made.
            traceback.print_exc()
            report.fail(f"{name}: {type(error).__name__}: {str(error).strip()[:2000]}")
        report.figures.setdefault("seconds", {})[name] = round(monotonic() - began, 1)
        write()


def main(folder: Path) -> int:
    """Write the report; return the exit code: 1 where something is wrong."""
    report = Report(triton=triton_version() if importlib.util.find_spec("triton") else "")
    folder.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        document = asdict(report)
        (folder / "gpu_check.json").write_text(json.dumps(document, indent=2) + "\n")
        if report.device is not None:
            (folder / "gpu_check.md").write_text(table(document))

    run(report, torch.device("cuda", 0), write)
    for each in goals(report.figures):
        report.say(f"{each.name}: {each.found} ({each.where}), wanted {each.wanted}: {'yes' if each.met else 'NO'}")
    if report.figures.get("steps") or report.figures.get("pipeline"):
        try:
            draw(asdict(report), folder / "gpu_check.png")
        except ModuleNotFoundError as error:
            report.note(f"no picture: {error.name} is not installed")
    write()
    print(f"{'FAILED' if report.problems else 'all is well'}; written to {folder}")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
