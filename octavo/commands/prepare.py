"""`octavo prepare`."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "prepare",
        help="write what the services need to know of a model",
        description="Write tokenizer, chat template, defaults and content hash of a model into a folder beside its "
        "weights. Gateway and executor read that folder; the hash is the model's revision.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a GGUF file, a Hugging Face folder (config.json, safetensors, tokenizer), a name that was pulled, or a "
        "hub id (owner/name), which is fetched",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="where to write; give this folder as --model then [default: octavo/ in the folder, STEM.octavo/ beside "
        "the file]",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prepare. Raises ModelError."""
    from octavo.models.prepare import prepare

    prepare(args.model, args.output)
    return 0
