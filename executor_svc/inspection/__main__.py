"""Answers a question about models in JSON: python -m executor_svc.inspection families, model MODEL, graph MODEL, or
export.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TextIO

from executor_svc.inspection.export import DTYPES, export
from executor_svc.inspection.families import supported
from executor_svc.inspection.model_report import Question, report_on
from executor_svc.kernels.native.build import KernelBuildError
from executor_svc.weights import ModelLoadError
from octavo.models.errors import ModelError


def main() -> int:
    """Print the answer to stdout. Returns 0: what is wrong with a model is part of the answer."""
    parser = argparse.ArgumentParser(prog="executor_svc.inspection")
    questions = parser.add_subparsers(dest="question", required=True)
    questions.add_parser("families")
    model = questions.add_parser("model")
    model.add_argument("model")
    model.add_argument("--dtype", default="auto")
    model.add_argument("--context", type=int)
    model.add_argument("--batch", type=int)
    model.add_argument("--kv-memory", type=int)
    model.add_argument("--allow-pickle", action="store_true")
    copy = questions.add_parser("export")
    copy.add_argument("weights", type=Path)
    copy.add_argument("folder", type=Path)
    copy.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    graph = questions.add_parser("graph")
    graph.add_argument("model")
    graph.add_argument("--passes", default="all")
    graph.add_argument("--ops")
    graph.add_argument("--dtype", default="auto")
    graph.add_argument("--svg", type=Path)
    args = parser.parse_args()
    answers = _stdout_for_answers()
    if args.question == "families":
        answer = supported()
    elif args.question == "export":
        try:
            answer = export(args.weights, args.folder, args.dtype)
        except (ModelError, ModelLoadError) as error:
            answer = {"problem": str(error)}
    elif args.question == "graph":
        # Imported here: the others need none of it.
        from executor_svc.inspection.graph_report import graph_report

        try:
            answer = graph_report(args.model, args.passes, args.ops, args.dtype, args.svg)
        except (ModelError, ModelLoadError, KernelBuildError, ValueError, OSError) as error:
            answer = {"problem": str(error)}
    else:
        answer = report_on(
            Question(args.model, args.dtype, args.context, args.batch, args.kv_memory, args.allow_pickle)
        )
    with answers:
        json.dump(answer, answers)
    return 0


def _stdout_for_answers() -> TextIO:
    """Return stdout, and have whatever else prints there, a user's operators or a library, print to stderr."""
    sys.stdout.flush()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


if __name__ == "__main__":
    raise SystemExit(main())
