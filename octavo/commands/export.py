"""`octavo export`."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "export",
        help="write a model as a Hugging Face folder",
        description="Unpack a GGUF file, or convert a folder, into a new Hugging Face folder: config.json, "
        "model.safetensors, tokenizer and defaults. What is served from the folder is what is served from the file.",
    )
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, a Hugging Face folder or a name that was pulled")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where to write; must be new or empty")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="type of the numbers written; float32 loses nothing [default: float32]",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Export. Raises ModelError, ModuleNotFoundError."""
    from octavo.local.executor_query import ask_executor
    from octavo.models.errors import ModelError
    from octavo.models.location import locate
    from octavo.models.prepared import open_prepared

    location = locate(args.model)
    weights = open_prepared(args.model).weights if location.weights is None else location.weights
    if not weights.exists():
        raise ModelError(f"{location.name} is not on this machine: run `octavo pull {location.given}`")
    folder = args.folder.expanduser().absolute()
    answer = ask_executor("export", str(weights), str(folder), "--dtype", args.dtype)
    if "problem" in answer:
        raise ModelError(answer["problem"])
    for note in answer["notes"]:
        print(f"note: {note}")
    print(f"wrote {answer['tensors']} tensors to {answer['folder']}; serve it with: octavo up {args.folder}")
    return 0
