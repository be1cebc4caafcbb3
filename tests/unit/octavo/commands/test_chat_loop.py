"""`octavo chat`: what the model gets, what Ctrl-C stops, what an error leaves behind."""

from __future__ import annotations

import asyncio
import io
import signal
import sys
import threading
from collections.abc import Sequence

import grpc
import pytest
from fake_gateway import HANG, TIMEOUT, FakeGateway
from screen import Screen, Typed

import octavo
from octavo.cli import main
from octavo.rpc.errors import ServiceError
from octavo.terminal.chat_loop import COMMANDS, ChatLoop
from octavo.terminal.conversation import Conversation
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import model_pb2


def chat(
    gateway: FakeGateway,
    lines: Sequence[str | type[BaseException]],
    out: Screen | None = None,
    *,
    system: str | None = None,
    is_interactive: bool = True,
) -> tuple[int, str, str]:
    """Chat through the real client; return the exit code, what was shown, and the errors."""
    out = Screen(is_terminal=is_interactive) if out is None else out
    notes = io.StringIO()
    with asyncio.Runner() as runner:
        client = octavo.AsyncClient(gateway.address)
        try:
            loop = ChatLoop(
                runner, client.generate, Conversation(system), Typed(lines, is_interactive=is_interactive), out, notes
            )
            code = loop.run()
        finally:
            runner.run(client.close())
    return code, out.getvalue(), notes.getvalue()


def interrupt_at(text: str) -> Screen:
    """Return a screen at which a person presses Ctrl-C when a text appears, once."""
    seen = ""

    def on_write(new: str) -> None:
        nonlocal seen
        had = text in seen
        seen += new
        if text in seen and not had:
            signal.raise_signal(signal.SIGINT)

    return Screen(on_write=on_write)


def test_every_turn_is_sent_with_all_before_it(gateway: FakeGateway) -> None:
    """The model gets instructions, questions and its own answers, in order; the texts are what was shown."""
    gateway.script = lambda request: ["answer ", str(len(request.chat.messages))]
    code, shown, notes = chat(gateway, ["one", "two", "three"], system="be brief")
    assert (code, notes) == (0, "")
    assert gateway.conversations() == [
        [("system", "be brief"), ("user", "one")],
        [("system", "be brief"), ("user", "one"), ("assistant", "answer 2"), ("user", "two")],
        [
            ("system", "be brief"),
            ("user", "one"),
            ("assistant", "answer 2"),
            ("user", "two"),
            ("assistant", "answer 4"),
            ("user", "three"),
        ],
    ]
    assert "answer 2\n" in shown
    assert "2 tokens written, prompt 5, first token " in shown


def test_ctrl_c_stops_the_answer_and_not_the_chat(gateway: FakeGateway) -> None:
    """The server sees the call cancelled, what came stays in the history, and the next question is answered."""
    gateway.script = lambda request: ["par", "tial", HANG] if len(request.chat.messages) == 1 else ["whole"]
    code, shown, notes = chat(gateway, ["first", "second"], interrupt_at("tial"))
    assert gateway.left.wait(TIMEOUT)
    assert (code, notes) == (0, "")
    assert "stopped: 2 tokens written, prompt 5, first token " in shown
    assert gateway.conversations()[1] == [("user", "first"), ("assistant", "partial"), ("user", "second")]
    assert "whole" in shown


def test_an_answer_stopped_before_its_first_word_leaves_no_turn(gateway: FakeGateway) -> None:
    """A question without an answer would break templates that want the two to alternate, so it goes."""
    started = False
    main_thread = threading.get_ident()

    def script(request: pb.GenerateRequest) -> list[str]:
        nonlocal started
        if started:
            return ["fine"]
        started = True
        # The stream is open and says nothing: the person gives up. Any thread may tell the process.
        signal.pthread_kill(main_thread, signal.SIGINT)
        return [HANG]

    gateway.script = script
    _, shown, _ = chat(gateway, ["first", "second"])
    assert "stopped before anything came" in shown
    assert gateway.conversations()[1] == [("user", "second")]


def test_ctrl_c_at_the_prompt_says_how_to_end(gateway: FakeGateway) -> None:
    """It does not end the chat; Ctrl-D does, with exit code 0."""
    code, shown, _ = chat(gateway, [KeyboardInterrupt, "hi"])
    assert code == 0
    assert "Ctrl-D or /quit ends the chat" in shown
    assert len(gateway.requests) == 1


def test_an_error_is_shown_with_its_hint_and_the_chat_goes_on(gateway: FakeGateway) -> None:
    """The refused question is forgotten, since it would be refused again with each later one."""
    refusal = ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG", "the input has 9 tokens")
    gateway.script = lambda request: refusal if request.chat.messages[-1].content == "long" else ["short"]
    code, shown, notes = chat(gateway, ["long", "hi"])
    assert code == 0
    assert notes.startswith("octavo: error: the input has 9 tokens\nhint: shorten the input, or forget some of")
    assert "by /undo or /reset" in notes
    assert gateway.conversations()[1] == [("user", "hi")]
    assert "short" in shown


def test_a_gateway_that_goes_away_is_an_error_of_one_turn(gateway: FakeGateway) -> None:
    """Nobody listens at the address: said with what to do, and the chat lives on to its end."""
    gateway.address = "127.0.0.1:1"
    code, _, notes = chat(gateway, ["a", "b"])
    assert code == 0
    assert notes.count("cannot connect to") == 2
    assert notes.count("octavo up smollm2-135m-instruct") == 2


def test_undo_reset_and_system_change_what_is_sent(gateway: FakeGateway) -> None:
    """/undo takes back the last turn, /reset all of them, /system the instructions."""
    lines = ["a", "b", "/undo", "c", "/system be kind", "d", "/reset", "e", "/system", "f"]
    _, shown, _ = chat(gateway, lines)
    sent = gateway.conversations()
    assert sent[2] == [("user", "a"), ("assistant", "yes"), ("user", "c")]
    assert sent[3][0] == ("system", "be kind")
    assert sent[4] == [("system", "be kind"), ("user", "e")]
    assert sent[5][0] == ("user", "e")
    assert "forgotten: b" in shown


def test_help_lists_every_command_and_an_unknown_one_is_not_asked(gateway: FakeGateway) -> None:
    """A slip of the finger is not sent to the model; two slashes send one."""
    _, shown, _ = chat(gateway, ["/help", "/rest", "//etc is what?", "", "  "])
    assert all(name in shown for name in COMMANDS)
    assert "no command /rest" in shown
    assert gateway.conversations() == [[("user", "/etc is what?")]]


def test_what_a_model_writes_cannot_steer_the_terminal(gateway: FakeGateway) -> None:
    """Escape sequences are shown as a mark on a terminal, and stay as they are in the history."""
    gateway.script = lambda request: ["a\x1b[2Jb"]
    _, shown, _ = chat(gateway, ["one", "two"])
    assert "a\ufffd[2Jb" in shown
    assert gateway.conversations()[1][1] == ("assistant", "a\x1b[2Jb")


def test_a_pipe_gives_answers_alone_and_its_failure_in_the_exit_code(gateway: FakeGateway) -> None:
    """No prompt, no figures, no escape sequence on the output; 1 where one question got no answer."""
    gateway.script = lambda request: ["x\ny"]
    assert chat(gateway, ["1", "/undo", "2"], is_interactive=False) == (0, "x\ny\nx\ny\n", "forgotten: 1\n")
    gateway.script = lambda request: ServiceError(
        grpc.StatusCode.UNAVAILABLE, "NO_EXECUTOR", "none is ready", retry_delay=60.0
    )
    code, shown, notes = chat(gateway, ["1"], is_interactive=False)
    assert (code, shown) == (1, "")
    assert "octavo load" in notes


@pytest.mark.parametrize(
    ("models", "argv", "message"),
    [
        ([("a", True), ("b", True)], [], "several models are served: a, b\nhint: choose one with --model"),
        ([("a", True)], ["--model", "z"], "model 'z' is not served there\nhint: served: a"),
        ([("a", False)], [], "model a has no chat template\nhint: octavo complete"),
        ([], [], "the gateway serves no model\nhint: "),
    ],
)
def test_a_chat_that_cannot_be_is_refused_before_the_first_question(
    gateway: FakeGateway,
    models: list[tuple[str, bool]],
    argv: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Which model is meant, and whether it can chat, is settled at the start."""
    gateway.models = [model_pb2.Model(name=name, supports_chat=chats) for name, chats in models]
    assert main(["chat", "--address", gateway.address, *argv]) == 1
    assert f"octavo: error: {message}" in capsys.readouterr().err


def test_the_flags_reach_the_model(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options given are set on the wire, zero included; those left out are left to the model."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    argv = ["--temperature", "0", "--max-tokens", "9", "--seed", "3", "--system", "s", "--model", "m"]
    assert main(["chat", "--address", gateway.address, *argv]) == 0
    (request,) = gateway.requests
    assert request.model == "m"
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("top_p")
    assert not request.stopping.HasField("ignore_eos")
    assert (request.stopping.max_tokens, request.seed) == (9, 3)
    assert gateway.conversations() == [[("system", "s"), ("user", "hello")]]
    assert capsys.readouterr().out == "yes\n"
