"""`octavo complete`: the continuation of a text."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from octavo.commands.client_flags import add_gateway_flags, add_sampling_flags, options_of

if TYPE_CHECKING:
    from octavo.client.types import GenerateOptions
    from octavo.terminal.answers import Answer

_MAX_TOKENS = 256
"""Unless the user says otherwise: a base model need not end before the end of its context."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "complete",
        help="continue a text with the model that is served",
        description="Write what the model puts after a text to the standard output, as it comes, and nothing else.",
    )
    parser.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="the text; -, or none and a pipe: the standard input, without the line end at its end",
    )
    add_gateway_flags(parser)
    parser.add_argument("--stats", action="store_true", help="say on the standard error how many tokens and how fast")
    add_sampling_flags(parser, _MAX_TOKENS)
    parser.set_defaults(run=run, usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Complete one text. Raises ServiceError, CommandError, BrokenPipeError."""
    import asyncio
    import sys

    if args.prompt is None and sys.stdin.isatty():
        args.usage_error("give PROMPT or pipe a text; with - it is typed, and ends at Ctrl-D")
    prompt = args.prompt if args.prompt not in (None, "-") else _standard_input()
    if not prompt:
        from octavo.terminal.errors import CommandError

        raise CommandError("there is nothing to continue", "give PROMPT or pipe a text")
    answer = asyncio.run(complete(args.address, args.api_key, prompt, options_of(args)))
    if args.stats:
        print(f"{answer.figures()}, seed {answer.seed}", file=sys.stderr)
    return 0


async def complete(address: str | None, api_key: str | None, prompt: str, options: GenerateOptions) -> Answer:
    """Stream the continuation of `prompt` to the standard output. Raises ServiceError, BrokenPipeError."""
    import sys

    import octavo
    from octavo.terminal.answers import Answer, stream_answer
    from octavo.terminal.style import Style, printable

    is_terminal = Style(sys.stdout).is_terminal
    answer = Answer()

    def write(text: str) -> None:
        sys.stdout.write(printable(text) if is_terminal else text)
        sys.stdout.flush()

    async with octavo.AsyncClient(address, api_key=api_key) as client:
        try:
            await stream_answer(client.generate(prompt, **options), answer, write)
        finally:
            # The shell's next prompt, or an error, begins on a line of its own.
            if is_terminal and answer.text and not answer.text.endswith("\n"):
                write("\n")
    return answer


def _standard_input() -> str:
    import sys

    from octavo.terminal.errors import CommandError

    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise CommandError(f"the input is no UTF-8 text: {error}", "convert it, by iconv for example") from None
    return text.removesuffix("\n").removesuffix("\r")
