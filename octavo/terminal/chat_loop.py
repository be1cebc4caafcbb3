"""The loop of `octavo chat`: read a line, stream the answer, keep both."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from octavo.client.types import Message
from octavo.rpc.errors import ServiceError
from octavo.terminal.answers import Answer, Stream, stream_answer
from octavo.terminal.conversation import Conversation
from octavo.terminal.errors import explain, show
from octavo.terminal.line_input import LineInput
from octavo.terminal.style import Style, printable

COMMANDS = {
    "/help": "show this",
    "/system TEXT": "set the instructions to the model; without TEXT, remove them",
    "/undo": "forget the last question and its answer",
    "/reset": "forget the conversation; the instructions stay",
    "/quit": "end, as Ctrl-D does",
}
_NOTES = """\
Ctrl-C stops an answer; what came of it stays in the conversation. //TEXT asks TEXT with one slash before it."""

Ask = Callable[[Sequence[Message]], Stream]
"""Asks the model. Called on the event loop."""


class ChatLoop:
    """A conversation at a terminal, or over a pipe with a question a line."""

    def __init__(
        self,
        runner: asyncio.Runner,
        ask: Ask,
        conversation: Conversation,
        lines: LineInput,
        out: TextIO | None = None,
        notes: TextIO | None = None,
    ) -> None:
        """`out` gets the answers, `notes` the errors; by default the standard streams."""
        self._runner = runner
        self._ask = ask
        self._conversation = conversation
        self._lines = lines
        self._out = sys.stdout if out is None else out
        self._notes = sys.stderr if notes is None else notes
        self._style = Style(self._out)
        self._has_failed = False

    def run(self) -> int:
        """Go on until the input ends. Returns 1 where a piped question got no answer, else 0.

        Raises KeyboardInterrupt at Ctrl-C where nobody is there to type.
        """
        while True:
            try:
                line = self._lines.read()
            except EOFError:
                if self._lines.is_interactive:
                    print(file=self._out)
                break
            except KeyboardInterrupt:
                if not self._lines.is_interactive:
                    raise
                self._say("\n(Ctrl-D or /quit ends the chat)")
                continue
            if line.strip() == "/quit":
                break
            try:
                self._take(line)
            except KeyboardInterrupt:
                # It came between the stream and the prompt.
                if not self._lines.is_interactive:
                    raise
        return 1 if self._has_failed and not self._lines.is_interactive else 0

    def _take(self, line: str) -> None:
        text = line.strip()
        if text.startswith("/") and not text.startswith("//"):
            self._obey(text)
        elif text:
            self._answer(text.removeprefix("/") if text.startswith("//") else line)

    def _obey(self, text: str) -> None:
        word, _, rest = text.partition(" ")
        match word:
            case "/help":
                width = max(len(name) for name in COMMANDS)
                listed = [f"{name.ljust(width)}  {meaning}" for name, meaning in COMMANDS.items()]
                self._say("\n".join([*listed, _NOTES]))
            case "/system":
                self._conversation.system = rest.strip() or None
                self._say("instructions set" if rest.strip() else "instructions removed")
            case "/undo":
                question = self._conversation.undo()
                self._say(f"forgotten: {question}" if question else "there is nothing to forget")
            case "/reset":
                self._conversation.reset()
                self._say("the conversation begins anew")
            case _:
                self._say(f"no command {word}: /help lists them; to ask this, begin it with //")

    def _answer(self, question: str) -> None:
        answer = Answer()
        error: ServiceError | None = None
        is_stopped = False
        try:
            is_stopped = self._runner.run(self._stream(question, answer))
        except ServiceError as raised:
            error = raised
        finally:
            # However it ended, what is on the screen is what the model will be reminded of.
            self._conversation.add(question, answer.text)
        if answer.text or not error:
            print(file=self._out, flush=True)
        if error is not None:
            self._has_failed = True
            explained = explain(error, in_chat=self._lines.is_interactive)
            assert explained is not None  # every ServiceError has words
            show(explained, self._notes)
        elif self._style.is_terminal:
            self._say(_closing(answer, is_stopped))
        if is_stopped and not self._lines.is_interactive:
            raise KeyboardInterrupt

    async def _stream(self, question: str, answer: Answer) -> bool:
        """Stream one answer and return whether Ctrl-C stopped it."""
        stream = self._ask(self._conversation.ask(question))
        reading = asyncio.create_task(stream_answer(stream, answer, self._write))
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, reading.cancel)
        try:
            await asyncio.wait([reading])
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            reading.cancel()
        if reading.cancelled():
            return True
        reading.result()
        return False

    def _write(self, text: str) -> None:
        self._out.write(printable(text) if self._style.is_terminal else text)
        self._out.flush()

    def _say(self, text: str) -> None:
        """Tell the person something. A program that reads the output gets answers alone."""
        out = self._out if self._style.is_terminal else self._notes
        print(self._style.dim(printable(text)), file=out, flush=True)


def _closing(answer: Answer, is_stopped: bool) -> str:
    if not is_stopped:
        return answer.figures()
    return f"stopped: {answer.figures()}" if answer.text else "stopped before anything came; the question is gone"
