"""How bench/peers.py and a runner talk: JSON, a line each. Standard library only; runs in every peer's environment.

The runner is started with the model and the number of threads and says first what it is:

    {"ready": true, "label": ..., "versions": ..., "load_s": ..., "url": ...}

A runner with a `url` has started a server with OpenAI's API there, and is only asked for its memory. To any other a
line is a batch, and a line is the answer:

    {"prompts": [[id, ...], ...], "lengths": [n, ...]}  ->  {"total_s": ..., "lengths": [n, ...], "peak_rss_mib": ...}
    {}                                                  ->  {"peak_rss_mib": ...}

{"error": ...} ends either. At the end of its input the runner stops what it started and ends. Whatever the engine
prints goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO


class Engine:
    """What a runner runs. `label` says it in the table, `versions` in the figures; `url` is a server's, else None."""

    label = ""
    versions = ""
    url: str | None = None

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        """Generate greedily, exactly `lengths[i]` tokens after `prompts[i]`, all at once; return the new tokens."""
        raise NotImplementedError

    def stop(self) -> None:
        """End what was started."""


def main(
    make_engine: Callable[[argparse.Namespace], Engine], *modes: str, convert: Callable[[Path], Path] | None = None
) -> None:
    """Run an engine until the input ends. `modes`: values of --mode, the first one the default.

    `convert` returns the model in the engine's own form, made if need be; it is no part of the time to load.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kv-gib", type=int, default=4, help="memory for keys and values")
    if modes:
        parser.add_argument("--mode", choices=modes, default=modes[0])
    args = parser.parse_args()
    answers = _private_output()
    # As at the end of the input: what was started is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    # No engine is to look for anything on the network.
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    engine = None
    try:
        args.model = args.model if convert is None else convert(args.model)
        start = time.perf_counter()
        engine = make_engine(args)
        ready = {"label": engine.label, "versions": engine.versions, "url": engine.url}
        _say(answers, {"ready": True, "load_s": time.perf_counter() - start, **ready})
        for line in sys.stdin:
            _say(answers, _answer(engine, json.loads(line)))
    except Exception as error:  # whatever an engine raises is a result: it is reported by the peer's name
        _say(answers, {"error": f"{type(error).__name__}: {error}"})
        raise
    finally:
        if engine is not None:
            engine.stop()


def _answer(engine: Engine, asked: dict[str, Any]) -> dict[str, Any]:
    if not asked:
        return {"peak_rss_mib": peak_rss_mib()}
    forget_peaks()
    start = time.perf_counter()
    made = engine.generate(asked["prompts"], asked["lengths"])
    total = time.perf_counter() - start
    return {"total_s": total, "lengths": [len(tokens) for tokens in made], "peak_rss_mib": peak_rss_mib()}


def _private_output() -> TextIO:
    """Return the standard output for answers alone: what libraries print goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, what: dict[str, Any]) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


def processes(pid: int) -> list[int]:
    """Return a process and its living descendants."""
    found = [pid]
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += processes(int(child))
    except OSError:  # it has ended meanwhile
        pass
    return found


def peak_rss_mib() -> float:
    """Return the sum of the peak resident sizes of this process and its descendants, MiB."""
    total = 0
    for pid in processes(os.getpid()):
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        total += next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
    return total / 1024


def forget_peaks() -> None:
    """Let peaks count from now on, where the system allows it."""
    for pid in processes(os.getpid()):
        try:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        except OSError:
            continue
