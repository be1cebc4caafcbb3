"""`octavo prepare`."""

from __future__ import annotations

import argparse
import functools
import signal
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
    parser.add_argument(
        "--wait",
        action="store_true",
        help="fetch and prepare nothing: wait until another process has, in a volume that both see. A container that "
        "may only read the volume starts with it",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prepare. Raises ModelError, CommandError."""
    if args.if_needed or args.wait:
        from octavo.models.ensure import ensure_prepared, wait_prepared
        from octavo.terminal.errors import CommandError

        if args.if_needed and args.wait:
            raise CommandError(
                "--if-needed prepares and --wait leaves it to others", "give --wait alone where others prepare"
            )
        if args.output is not None or args.tokenizer is not None or args.allow_pickle:
            raise CommandError(
                f"--{'wait' if args.wait else 'if-needed'} looks in the usual place only",
                "leave out --output, --tokenizer and --allow-pickle",
            )
        if args.wait:
            # The first process of a container hears no signal without a handler for it.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            model = wait_prepared(args.model, functools.partial(print, flush=True))
        else:
            model = ensure_prepared(args.model)
        print(f"{model.name} is prepared in {model.path}, revision {model.revision[:12]}")
        return 0
    from octavo.models.prepare import prepare

    prepare(args.model, args.output, tokenizer=args.tokenizer, allow_pickle=args.allow_pickle)
    return 0
