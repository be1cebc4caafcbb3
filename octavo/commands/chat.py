"""`octavo chat`: a conversation with the model that is served."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from octavo.commands.client_flags import add_gateway_flags, add_sampling_flags, options_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.client.types import Model

_CONNECT_TIMEOUT = 10.0
_PROMPT = "> "


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "chat",
        help="talk to the model that is served",
        description="Ask, read the answer as it is written, ask again: the model gets the whole conversation each "
        "time. Ctrl-C stops an answer, Ctrl-D ends the chat, /help lists what else there is. Where the input is no "
        "terminal, each line is a question, and the exit code is 1 where one got no answer. What you type is kept in "
        "OCTAVO_HOME/chat_history.",
        extra_hint="`octavo chat` asks for questions; to ask a single one: echo 'QUESTION' | octavo chat",
    )
    add_gateway_flags(parser)
    parser.add_argument("--system", metavar="TEXT", help="instructions to the model, before the conversation")
    add_sampling_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Chat until the input ends. Raises ServiceError and CommandError where there is nobody to chat with."""
    import asyncio
    import sys

    import octavo
    from octavo.home import octavo_home
    from octavo.terminal.chat_loop import ChatLoop
    from octavo.terminal.conversation import Conversation
    from octavo.terminal.line_input import open_lines
    from octavo.terminal.style import Style

    options = options_of(args)
    with asyncio.Runner() as runner:
        client = octavo.AsyncClient(args.address, api_key=args.api_key)
        try:
            model = choose(runner.run(client.list_models(timeout=_CONNECT_TIMEOUT)), args.model)
            options["model"] = model.name
            lines = open_lines(_PROMPT, octavo_home() / "chat_history")
            if lines.is_interactive:
                style = Style(sys.stdout)
                hints = "/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends"
                print(f"{style.bold(model.name)} at {client.address}\n{style.dim(hints)}")
            conversation = Conversation(args.system)
            return ChatLoop(runner, lambda turns: client.generate(turns, **options), conversation, lines).run()
        finally:
            runner.run(client.close())


def choose(models: Sequence[Model], name: str | None) -> Model:
    """Return the model to chat with: the one named, or the only one. Raises CommandError."""
    from octavo.terminal.errors import CommandError

    served = ", ".join(model.name for model in models)
    if name is not None:
        models = [model for model in models if model.name == name]
        if not models:
            raise CommandError(f"model {name!r} is not served there", f"served: {served}")
    if len(models) > 1:
        raise CommandError(f"several models are served: {served}", "choose one with --model")
    if not models:
        raise CommandError("the gateway serves no model", "start one with a model: octavo up MODEL")
    (model,) = models
    if not model.supports_chat:
        raise CommandError(f"model {model.name} has no chat template", "octavo complete continues a text with it")
    return model
