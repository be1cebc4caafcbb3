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
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FOLDER",
        help="take the tokenizer of this Hugging Face folder: for a GGUF file whose own Octavo does not know",
    )
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="take PyTorch's pytorch_model.bin where a folder has no safetensors file: its tensors alone are loaded, "
        "no code in it is run",
    )
    parser.add_argument(
        "--if-needed",
        action="store_true",
        help="fetch and prepare only what never was: a model that is whole is left as it is, and no network is asked",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prepare. Raises ModelError, CommandError."""
    if args.if_needed:
        from octavo.models.ensure import ensure_prepared
        from octavo.terminal.errors import CommandError

        if args.output is not None or args.tokenizer is not None or args.allow_pickle:
            raise CommandError(
                "--if-needed prepares in the usual way and place only",
                "leave out --output, --tokenizer and --allow-pickle",
            )
        model = ensure_prepared(args.model)
        print(f"{model.name} is prepared in {model.path}, revision {model.revision[:12]}")
        return 0
    from octavo.models.prepare import prepare

    prepare(args.model, args.output, tokenizer=args.tokenizer, allow_pickle=args.allow_pickle)
    return 0
