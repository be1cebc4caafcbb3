"""Tables, figures, colours and explained errors."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from importlib import metadata

import grpc
import pytest
from screen import Screen

from octavo.client.errors import START_HINT
from octavo.local.plan import PlanError
from octavo.rpc.errors import FieldViolation, ServiceError, invalid_argument
from octavo.terminal import packages
from octavo.terminal.errors import CommandError, Explained, explain, show
from octavo.terminal.figures import duration, share, size
from octavo.terminal.style import Style, printable
from octavo.terminal.table import table


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0.0s"),
        (0.04, "0.0s"),
        (9.94, "9.9s"),
        (9.96, "10s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (125, "2m05s"),
        (3599.6, "1h00m"),
        (7800, "2h10m"),
        (86399.9, "1d00h"),
        (4 * 86400 + 6.5 * 3600, "4d06h"),
    ],
)
def test_a_duration_has_at_most_two_units(seconds: float, text: str) -> None:
    """Rounding never shows sixty of anything."""
    assert duration(seconds) == text


def test_sizes_and_shares() -> None:
    """Binary units; a share of nothing is no number."""
    assert [size(value) for value in (0, 1023, 1536, 5 << 30, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
        "3.0 TiB",
    ]
    assert (share(1, 3), share(0, 0)) == ("33%", "-")


def test_a_table_is_as_wide_as_its_widest_cells() -> None:
    """Text to the left, numbers to the right, no spaces at the ends of lines."""
    assert table(["id", "n"], [["a", "10"], ["long one", "5"]], align="lr").splitlines() == [
        "id         n",
        "a         10",
        "long one   5",
    ]
    assert table(["id", "label"], [["a", ""]], align="ll").splitlines() == ["id  label", "a"]


@pytest.mark.parametrize(
    ("is_terminal", "environ", "is_coloured"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (True, {"TERM": "dumb"}, False),
    ],
)
def test_colours_are_for_terminals_that_want_them(
    is_terminal: bool, environ: dict[str, str], is_coloured: bool
) -> None:
    """A pipe gets plain text, and so does who asked for it."""
    style = Style(Screen(is_terminal=is_terminal), environ)
    assert style.red("x") == ("\x1b[31mx\x1b[0m" if is_coloured else "x")


def test_text_of_others_keeps_its_letters_and_loses_its_controls() -> None:
    """Every script and emoji stays, with the joiners they need; escapes, bells and direction marks do not."""
    kept = "naïve 漢字 عربى नमस्\u200dते 👩\u200d💻\n\ttab"
    assert printable(kept) == kept
    assert printable("a\x1b[31mb\x07\r\u202e\u2066\ud800") == "a\ufffd[31mb\ufffd\ufffd\ufffd\ufffd\ufffd"


def service_error(code: grpc.StatusCode, reason: str, message: str = "m") -> ServiceError:
    """An error of a service."""
    return ServiceError(code, reason, message)


def test_the_reason_decides_on_the_hint_before_the_code_does() -> None:
    """Two errors of one code want different things done."""
    unavailable = grpc.StatusCode.UNAVAILABLE
    executor, scheduler = (explain(service_error(unavailable, name)) for name in ("NO_EXECUTOR", "NO_SCHEDULER"))
    assert executor is not None
    assert scheduler is not None
    assert "octavo load" in (executor.hint or "")
    assert "octavo doctor" in (scheduler.hint or "")
    full = explain(service_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"))
    assert full is not None
    assert "repeat it in a moment" in (full.hint or "")
    assert explain(service_error(grpc.StatusCode.INTERNAL, "INTERNAL")) == Explained("m", None)


@pytest.mark.parametrize(
    ("metadata", "in_chat", "hint"),
    [
        ({"max_model_len": "512", "max_position_embeddings": "512"}, False, "shorten the input"),
        (
            {"max_model_len": "512", "max_position_embeddings": "512"},
            True,
            "shorten the input, or forget some of the conversation by /undo or /reset",
        ),
        (
            {"max_model_len": "512", "max_position_embeddings": "2048"},
            False,
            "shorten the input, or serve the model with a larger --max-model-len: its own end is at 2048 tokens",
        ),
        ({}, False, "shorten the input, or serve the model with a larger --max-model-len where it has one"),
    ],
)
def test_a_long_prompt_is_told_only_what_can_help(metadata: dict[str, str], in_chat: bool, hint: str) -> None:
    """No longer context where the model has none, no command of the chat outside it."""
    violation = FieldViolation("text", "has 600 tokens; so at most 511 of input")
    explained = explain(invalid_argument([violation], metadata), in_chat=in_chat)
    assert explained is not None
    assert explained.hint == hint


def test_advice_inside_a_clients_message_becomes_the_hint() -> None:
    """Nothing is said twice."""
    error = service_error(grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE", f"cannot connect to x; {START_HINT}")
    explained = explain(error)
    assert explained == Explained("cannot connect to x", f"{START_HINT}; --address HOST:PORT names another place")


def test_only_what_a_person_can_put_right_is_explained() -> None:
    """A defect keeps its traceback; a plan's error has its flag in its words already."""
    assert explain(ValueError("bug")) is None
    assert explain(PlanError("--gateway-port: no")) == Explained("--gateway-port: no", None)
    assert explain(CommandError("a", "b")) == Explained("a", "b")


def test_an_error_is_two_lines_at_most() -> None:
    """The error, then the hint where there is one."""
    out = io.StringIO()
    show(Explained("bad\x1b[2J", "do this"), out)
    show(Explained("worse"), out)
    assert out.getvalue() == "octavo: error: bad\ufffd[2J\nhint: do this\noctavo: error: worse\n"


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("httpx", "bench"),
        ("transformers.models", "executor"),
        ("jinja2", "gateway"),
        ("huggingface_hub", "executor"),
        ("unheard_of", "executor"),
    ],
)
def test_a_missing_module_is_traced_to_its_extra(monkeypatch: pytest.MonkeyPatch, module: str, extra: str) -> None:
    """By what the distribution declares; where two extras have it, the one that prepares and runs models."""
    declared = [("httpx", "bench"), ("transformers", "gateway"), ("transformers", "executor"), ("jinja2", "gateway")]
    declared.append(("huggingface-hub", "executor"))
    lines = ["grpcio<2,>=1.78", *(f'{package}>=1; extra == "{name}"' for package, name in declared)]
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    assert packages.requirement_for(module) == f'pip install "octavo[{extra}]"'


def test_help_imports_no_grpc() -> None:
    """`octavo --help` is looked at often: nothing that a command needs is loaded for it."""
    code = (
        "import sys; from octavo.cli import _parser; _parser().format_help(); "
        "print(sorted({'grpc', 'google.protobuf', 'readline', 'shtab', 'torch'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=os.environ)
    assert done.stdout == "[]\n"
