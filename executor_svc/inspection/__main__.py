"""Answers a question about models in JSON: python -m executor_svc.inspection families, ... model MODEL."""

from __future__ import annotations

import argparse
import json
import sys

from executor_svc.inspection.families import supported
from executor_svc.inspection.model_report import Question, report_on


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
    args = parser.parse_args()
    if args.question == "families":
        answer = supported()
    else:
        answer = report_on(
            Question(args.model, args.dtype, args.context, args.batch, args.kv_memory, args.allow_pickle)
        )
    json.dump(answer, sys.stdout)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
