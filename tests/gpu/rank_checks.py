"""An executor of two ranks, each on a device of its own, against one process on a CPU, in float32: to the token.

rank_checks.py FOLDER DEVICE GRAPHS is rank 0 and starts the other as executors do, so it is a process by itself; it
writes what differs as JSON. FOLDER is a prepared model; DEVICE is cuda, or cpu to try it out; GRAPHS is 0 or 1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

from factories import make_llama, prepared_from
from fakes_executor import Driver
from fakes_pipeline import Ahead, make_plain
from runner_checks import LIMITS, sequences

from executor_svc.kernels import build_kernels
from executor_svc.load import plan_load
from executor_svc.models import load_weights
from executor_svc.parallel.place import find_place
from executor_svc.parallel.start import start_ranks
from executor_svc.pipeline.runner import PipelinedRunner
from executor_svc.ranks_plan import RanksPlan
from octavo.models import open_prepared
from octavo.rpc.stages import Stages
from octavo.settings import ExecutorSettings

RANKS = 2
SECONDS = 240.0
"""For two processes to load a tiny model, capture graphs of it, and write some hundred tokens."""


def rank_problems(scratch: Path, device: str) -> list[str]:
    """Return what goes wrong, with graphs and without, in processes that are ended where they take too long."""
    folder = prepared_from(make_llama(scratch / "tiny", seed=3)).path
    problems = []
    for graphs in (1, 0) if device != "cpu" else (0,):
        how = "with graphs" if graphs else "op by op"
        command = [sys.executable, __file__, str(folder), device, str(graphs)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            problems.append(f"{RANKS} ranks, {how}: no end after {SECONDS:.0f} s")
            continue
        if done.returncode:
            last = done.stderr.strip().splitlines()[-3:]
            problems.append(f"{RANKS} ranks, {how}: exit code {done.returncode}: {' | '.join(last)}")
            continue
        told = json.loads(done.stdout.splitlines()[-1])
        problems += [f"{RANKS} ranks, {how}: {each}" for each in told["problems"]]
        if bool(told["num_graphs"]) != bool(graphs):
            problems.append(f"{RANKS} ranks, {how}: {told['num_graphs']} graphs")
    return problems


def _outputs(run: Any, limits: Any, **options: int) -> dict[str, list[int]]:
    driver = Driver(run, limits, **options)
    for key, sequence in sequences().items():
        driver.add(key, sequence)
    return driver.finish()


def _compare(folder: Path, device: str, *, graphs: bool) -> dict[str, Any]:
    """Be rank 0; return what differs."""
    settings = ExecutorSettings(
        model=str(folder),
        device=device,
        dtype="float32",
        tensor_parallel=RANKS,
        block_size=LIMITS.block_size,
        max_num_seqs=LIMITS.max_num_seqs,
        max_num_batched_tokens=LIMITS.max_num_batched_tokens,
        max_model_len=LIMITS.max_model_len,
        kv_memory=64 << 20,
        enforce_eager=not graphs,
    )
    place = find_place(settings, {})
    assert place is not None
    load = plan_load(settings, Stages(), ranks=RanksPlan(place, start_ranks(settings, place)))
    runner = load()
    try:
        run = Ahead(runner).run if isinstance(runner, PipelinedRunner) else runner.run
        with torch.inference_mode():
            found = _outputs(run, runner.limits, depth=2, chunk=20)
            whole = load_weights(
                open_prepared(str(folder)).weights, torch.float32, torch.device("cpu"), build_kernels("reference")
            )
            expected = _outputs(make_plain(LIMITS, whole).run, LIMITS)
    finally:
        load.stop()
    wrong = [
        f"{key} prompt tokens: {found[key]} where one process has {expected[key]}"
        for key in expected
        if found[key] != expected[key]
    ]
    return {"problems": wrong, "num_graphs": getattr(runner, "num_graphs", 0)}


if __name__ == "__main__":
    print(json.dumps(_compare(Path(sys.argv[1]), sys.argv[2], graphs=sys.argv[3] == "1")), flush=True)
    # As executors end: NCCL would wait for the graphs that it is part of.
    os._exit(0)
