"""`octavo complete`: the text alone, from wherever the prompt comes, with the right exit code."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys

import grpc
import pytest
from fake_gateway import HANG, TIMEOUT, FakeGateway
from screen import Screen

from octavo.cli import main
from octavo.rpc.errors import FieldViolation, ServiceError, invalid_argument


class PipedInput(io.TextIOWrapper):
    """A standard input that is a pipe with these bytes."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))


def test_only_the_text_is_written(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """No line end is added where a program reads; figures come on the other stream, when asked for."""
    gateway.script = lambda request: [" a", " b"]
    assert main(["complete", "--address", gateway.address, "once"]) == 0
    assert capsys.readouterr() == (" a b", "")
    assert main(["complete", "--address", gateway.address, "once", "--stats", "--max-tokens", "2"]) == 0
    out, err = capsys.readouterr()
    assert out == " a b"
    assert re.fullmatch(
        r"2 tokens written, prompt 5, first token \d+ ms(, then \S+ tokens/s)?, cut at the limit of tokens, seed 7\n",
        err,
    )
    assert [request.text for request in gateway.requests] == ["once", "once"]


def test_flags_of_scheduling_and_cache(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """Each flag sets its field, a negative priority too; what is not given is unset; --stats has the cached tokens."""
    gateway.cached_tokens = 4
    flags = ["--priority", "-3", "--queue-ttl", "2.5", "--first-token-target", "9", "--cache-salt", "s"]
    assert main(["complete", "--address", gateway.address, "x", *flags, "--bypass-cache", "--stats"]) == 0
    assert ", prompt 5 (4 cached), " in capsys.readouterr().err
    assert main(["complete", "--address", gateway.address, "x"]) == 0
    given, unset = gateway.requests
    scheduling, cache = given.scheduling, given.cache
    assert scheduling.priority == -3
    assert scheduling.queue_ttl.ToMilliseconds() == 2500
    assert scheduling.first_token_target.ToMilliseconds() == 9000
    assert (cache.salt, cache.bypass) == ("s", True)
    assert not unset.HasField("scheduling")
    assert not unset.HasField("cache")


def test_texts_that_stop(gateway: FakeGateway) -> None:
    """Each --stop is one more text that stops, as it is."""
    flags = ["--stop", "END", "--stop", "\n\n"]
    assert main(["complete", "--address", gateway.address, "x", *flags]) == 0
    assert main(["complete", "--address", gateway.address, "x"]) == 0
    assert [list(request.stopping.stop) for request in gateway.requests] == [["END", "\n\n"], []]


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--stop", "", "must be a text of 1 to 1024 characters, has 0"),
        ("--priority", "101", "must be a whole number from -100 to 100, is '101'"),
        ("--queue-ttl", "0", "must be a number from 0.001 to 86400, is '0'"),
        ("--first-token-target", "nan", "must be a number from 0.001 to 86400, is 'nan'"),
        ("--cache-salt", "", "must be a text of 1 to 128 characters, has 0"),
        ("--cache-salt", "s" * 129, "must be a text of 1 to 128 characters, has 129"),
        ("--cache-salt", "\udcff", "must be valid UTF-8 text"),
    ],
)
def test_flags_that_cannot_be(flag: str, value: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What the gateway would refuse is refused by the name of its flag, before anybody is asked."""
    with pytest.raises(SystemExit) as ended:
        main(["complete", "x", flag, value])
    assert ended.value.code == 2
    assert f"{flag}: {words}" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["-"], []])
@pytest.mark.parametrize(("data", "prompt"), [(b"one\ntwo\n", "one\ntwo"), (b"x\r\n", "x"), (b"\xc3\xa9 ", "é ")])
def test_the_prompt_may_come_from_a_pipe(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, argv: list[str], data: bytes, prompt: str
) -> None:
    """One line end at its end is the shell's and not the text's; everything else is kept."""
    monkeypatch.setattr(sys, "stdin", PipedInput(data))
    assert main(["complete", "--address", gateway.address, *argv]) == 0
    assert gateway.requests[0].text == prompt


def test_input_that_is_no_text_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is guessed about bytes that are not UTF-8."""
    monkeypatch.setattr(sys, "stdin", PipedInput(b"\xff\xfe"))
    assert main(["complete", "-"]) == 1
    assert capsys.readouterr().err.startswith("octavo: error: the input is no UTF-8 text")


def test_a_terminal_without_a_prompt_is_bad_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Waiting in silence for input would look like a hang."""
    monkeypatch.setattr(sys, "stdin", Screen())
    with pytest.raises(SystemExit) as ended:
        main(["complete"])
    assert ended.value.code == 2
    assert "give PROMPT or pipe a text" in capsys.readouterr().err


def test_a_terminal_gets_a_line_end_and_no_escape_sequences(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shell's prompt comes on a line of its own, and the model cannot steer the screen."""
    gateway.script = lambda request: ["a\x1b[2J"]
    monkeypatch.setattr(sys, "stdout", Screen())
    assert main(["complete", "--address", gateway.address, "x"]) == 0
    assert sys.stdout.getvalue() == "a\ufffd[2J\n"  # type: ignore[attr-defined]


def test_ctrl_c_cancels_and_exits_with_130(gateway: FakeGateway) -> None:
    """The request ends on the server; the exit code is the one shells give to an interrupt."""
    gateway.script = lambda request: ["a", HANG]
    command = [sys.executable, "-m", "octavo", "complete", "--address", gateway.address, "x"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"a"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130, errors
    assert gateway.left.wait(TIMEOUT)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ServiceError(grpc.StatusCode.UNAVAILABLE, "NO_EXECUTOR", "no executor is ready", retry_delay=60.0),
            "octavo: error: no executor is ready (try again in 60 s)\nhint: an executor may be starting: wait and",
        ),
        (
            ServiceError(grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", "model 'z' is not served here; served: m"),
            "octavo: error: model 'z' is not served here; served: m\nhint: name one of those with --model",
        ),
        (
            invalid_argument(
                [FieldViolation("sampling.top_p", "too much"), FieldViolation("stopping.max_tokens", "no")]
            ),
            "octavo: error: sampling.top_p: too much; stopping.max_tokens: no\nhint: see --top-p, --max-tokens\n",
        ),
        (
            ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS", "it serves 4 of 4", retry_delay=1),
            "octavo: error: it serves 4 of 4 (try again in 1 s)\nhint: the gateway serves as much as it may",
        ),
        (
            ServiceError(grpc.StatusCode.DEADLINE_EXCEEDED, "QUEUE_TTL", "it has waited for 2 s"),
            "octavo: error: it has waited for 2 s\nhint: it waits in the queue for others: repeat it later or with a",
        ),
    ],
)
def test_a_refusal_is_told_with_what_to_do(
    gateway: FakeGateway, error: ServiceError, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The gateway's own words, then the next step; exit code 1, and nothing on the output."""
    gateway.script = lambda request: error
    assert main(["complete", "--address", gateway.address, "x"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(said)


def test_nobody_at_the_address_is_told_with_both_ways_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Start a cell, or name another address."""
    assert main(["complete", "--address", "127.0.0.1:1", "x"]) == 1
    err = capsys.readouterr().err
    assert re.match(r"octavo: error: cannot connect to .*127\.0\.0\.1:1: connection refused\nhint: ", err)
    assert "`octavo up smollm2-135m-instruct`" in err
    assert "--address HOST:PORT" in err


@pytest.mark.parametrize("argv", [["--address", "nowhere", "x"], ["--temperature", "warm", "x"], ["a", "b"]])
def test_bad_usage_exits_with_2(argv: list[str]) -> None:
    """What can be seen without asking anybody is a usage error."""
    with pytest.raises(SystemExit) as ended:
        main(["complete", *argv])
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("flag", "value", "wanted"),
    [
        ("--temperature", "hot", "a number from 0 to 2"),
        ("--temperature", "2.1", "a number from 0 to 2"),
        ("--top-p", "0", "a number above 0 and at most 1"),
        ("--presence-penalty", "nan", "a number from -2 to 2"),
        ("--max-tokens", "0", "a whole number from 1 to 4294967295"),
        ("--max-tokens", "9" * 5000, "a whole number from 1 to 4294967295"),
        ("--seed", "1.5", "a whole number from 0 to 18446744073709551615"),
    ],
)
def test_a_number_out_of_range_is_told_with_its_flag_and_range(
    flag: str, value: str, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody has to know what a float is, or to ask a gateway."""
    with pytest.raises(SystemExit) as ended:
        main(["complete", "x", flag, value])
    assert ended.value.code == 2
    assert f"error: {flag}: must be {wanted}, is '{value}'\n" in capsys.readouterr().err


def test_a_completion_is_short_unless_it_is_to_be_long(gateway: FakeGateway) -> None:
    """Without --max-tokens a base model would go on to the end of its context; the help names the default."""
    for argv in ([], ["--max-tokens", "1000"]):
        assert main(["complete", "--address", gateway.address, "x", *argv]) == 0
    assert [request.stopping.max_tokens for request in gateway.requests] == [256, 1000]


def test_the_help_names_the_default_of_max_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """A chat has another: its answers end by themselves."""
    for command, default in (("complete", "256"), ("chat", "what is left of the context")):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert f"[default: {default}]" in " ".join(capsys.readouterr().out.split())


def test_an_empty_prompt_is_refused_here(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is asked, and what to give is said."""
    assert main(["complete", ""]) == 1
    told = "octavo: error: there is nothing to continue\nhint: give PROMPT or pipe a text\n"
    assert capsys.readouterr() == ("", told)


@pytest.mark.parametrize(
    ("redirections", "code", "told"),
    [
        (">&-", 0, ""),
        ("<&-", 1, "octavo: error: there is nothing to continue\nhint: give PROMPT or pipe a text\n"),
        (">/dev/full", 1, "octavo: error: No space left on device\n"),
    ],
)
def test_streams_that_the_shell_closed_or_filled_do_no_harm(
    gateway: FakeGateway, redirections: str, code: int, told: str
) -> None:
    """A closed stream reads and writes as the null device; a full disk is told in a line, without a traceback."""
    gateway.script = lambda request: [" a"]
    command = f'"$0" -m octavo complete --address {gateway.address} - {redirections}'
    shell = ["sh", "-c", command, sys.executable]
    done = subprocess.run(shell, input="x", capture_output=True, text=True, timeout=TIMEOUT)
    assert (done.returncode, done.stderr) == (code, told)


def test_text_that_the_terminal_cannot_show_becomes_question_marks(gateway: FakeGateway) -> None:
    """An encoding without the letters of an answer costs the letters and not the answer."""
    gateway.script = lambda request: [" \u00e9", "a"]
    shell = [sys.executable, "-m", "octavo", "complete", "--address", gateway.address, "x"]
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(shell, capture_output=True, text=True, timeout=TIMEOUT, env=environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, " ?a", "")


@pytest.mark.parametrize("command", [["complete"], ["chat"]])
def test_arguments_and_input_that_are_no_text_are_refused(gateway: FakeGateway, command: list[str]) -> None:
    """Bytes that are no text end in one line that names the field, wherever they come from."""
    shell = [sys.executable, "-m", "octavo", *command, "--address", gateway.address]
    if command == ["complete"]:
        shell.append(b"a\xffb")  # type: ignore[arg-type]
    environ = {**os.environ, "PYTHONIOENCODING": "utf-8:strict", "PYTHONUTF8": "1"}
    done = subprocess.run(shell, input=b"a\xffb\n", capture_output=True, timeout=TIMEOUT, env=environ)
    assert done.returncode == 1
    assert re.fullmatch(
        rb"octavo: error: (text|chat\.messages\[0\]\.content): is not valid Unicode text\n", done.stderr
    )
