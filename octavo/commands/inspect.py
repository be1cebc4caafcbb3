"""`octavo inspect`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "inspect",
        help="look a model over without serving it: what it is, what it takes, what is wrong with it",
        description="Check a model's files, config, tensors and tokenizer, and print its architecture, its size, the "
        "bytes of KV memory that a token takes and what fits into this machine's memory. Nothing is served and no "
        "weight is read. The exit code is 1 where a check fails or what was asked for does not fit.",
    )
    parser.add_argument("model", metavar="MODEL", help="as for `octavo prepare`; it need not be prepared")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="type of weights and KV, as for the executor [default: auto]",
    )
    parser.add_argument("--context", type=_positive, metavar="TOKENS", help="see whether sequences of this length fit")
    parser.add_argument("--batch", type=_positive, metavar="N", help="see whether so many sequences fit at once")
    parser.add_argument(
        "--kv-memory", type=_size, metavar="SIZE", help="memory for KV, such as 4GiB [default: a share]"
    )
    parser.add_argument("--allow-pickle", action="store_true", help="as for `octavo prepare`")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Inspect. Raises ModelError, ModuleNotFoundError."""
    import json
    import sys

    from octavo.local.executor_query import ask_executor
    from octavo.terminal.style import Style

    question = ["model", args.model, "--dtype", args.dtype]
    for flag, value in (("context", args.context), ("batch", args.batch), ("kv-memory", args.kv_memory)):
        question += [f"--{flag}", str(value)] if value is not None else []
    answer = ask_executor(*question, *(["--allow-pickle"] if args.allow_pickle else []))
    print(json.dumps(answer, indent=2) if args.json else report(answer, Style(sys.stdout)))
    return 0 if answer["ok"] else 1


def report(answer: dict[str, Any], style: Any) -> str:
    """Return the report for people: figures, what fits, the checks."""
    from octavo.terminal.style import printable

    lines = []
    if "architecture" in answer:
        lines += [*_figures(answer), "", *_capacity(answer, style), ""]
    marks: dict[bool | None, Callable[[str], str]] = {True: style.green, False: style.red, None: style.dim}
    words = {True: "ok     ", False: "problem", None: "-      "}
    for check in answer["checks"]:
        lines.append(f"{marks[check['ok']](words[check['ok']])}  {check['check']:9}  {printable(check['text'])}")
    return "\n".join(lines)


def _figures(answer: dict[str, Any]) -> list[str]:
    from octavo.terminal.figures import size

    window = f", the last {answer['window']} tokens alone" if answer["window"] else ""
    longest, default = answer["max_position_embeddings"], answer["default_context"]
    unless = f"; {default} unless --max-model-len asks for more" if default < longest else ""
    rows = (
        ("architecture", answer["architecture"]),
        ("parameters", f"{answer['parameters'] / 1e6:,.1f} million"),
        ("shape", f"{answer['layers']} layers, {answer['kv_heads']} KV heads of {answer['head_dim']}"),
        ("vocabulary", f"{answer['vocab_size']} tokens"),
        ("context", f"{longest} tokens{window}{unless}"),
        ("files", size(answer["file_bytes"])),
        ("weights", f"{size(answer['weight_bytes'])} as {answer['dtype']}"),
        ("KV", f"{size(answer['kv_bytes_per_token'])} a token"),
    )
    return [f"{name:12}  {text}" for name, text in rows]


def _capacity(answer: dict[str, Any], style: Any) -> list[str]:
    from octavo.terminal.figures import size
    from octavo.terminal.table import table

    free, kv = size(answer["available_bytes"]), size(answer["kv_memory_bytes"])
    rows = [(str(each["context"]), str(each["sequences"])) for each in answer["sequences"]]
    lines = [
        f"of {free} free, {kv} for KV: {answer['kv_tokens']} tokens",
        table(("context", "sequences at once"), rows, align="rr", style=style),
    ]
    if "verdict" in answer:
        lines.append(f"{'fits' if answer['fits'] else 'does not fit'}: {answer['verdict']}")
    return lines


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 up, is {text!r}")
    return int(text)


def _size(text: str) -> int:
    from octavo.rpc.settings import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be {error}, is {text!r}") from None
