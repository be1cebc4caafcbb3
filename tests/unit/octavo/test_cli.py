"""The `octavo` command: its words, its exit codes, and what it tells people to paste."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from gguf_samples import byte_level_metadata, write_gguf
from google.protobuf import json_format

from octavo.cli import _parser, main
from octavo.commands.demo import ask
from octavo.local.hints import grpcurl_commands, python_program, ready_message
from octavo.local.plan import CellPlan, ServicePlan
from octavo.local.probe import wait_until_serving
from octavo.models import open_prepared
from octavo.rpc.errors import ServiceError
from octavo.rpc.server import RpcServer
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]
COMMANDS = ("pull", "prepare", "up", "serve", "demo", "version")


class ScriptedGateway(inference_pb2_grpc.InferenceServiceServicer):
    """Answers each chat with the same words and keeps the requests; with no words it refuses."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words
        self.requests: list[pb.GenerateRequest] = []

    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> None:  # noqa: N802
        """Stream one word a token."""
        self.requests.append(request)
        if not self.words:
            raise ServiceError(grpc.StatusCode.UNAVAILABLE, "NO_EXECUTOR", "no executor is ready", retry_delay=60.0)
        await context.write(pb.GenerateResponse(started=pb.Started(prompt_tokens=5)))
        for index, word in enumerate(self.words):
            delta = pb.Delta(first_token_index=index, text=word, token_ids=[index])
            await context.write(pb.GenerateResponse(delta=delta))
        finished = pb.ChoiceFinished(reason=pb.FINISH_REASON_STOP, completion_tokens=len(self.words))
        await context.write(pb.GenerateResponse(choice_finished=finished))
        usage = pb.Usage(prompt_tokens=5, completion_tokens=len(self.words))
        await context.write(pb.GenerateResponse(usage=usage))


def cell(address: str) -> CellPlan:
    """Return the addresses of a cell whose gateway is at `address`."""
    gateway_plan = ServicePlan("gateway", (), address, "127.0.0.1:9101")
    executor_plan = ServicePlan("executor-0", (), "127.0.0.1:50053", "127.0.0.1:9103")
    return CellPlan((gateway_plan, executor_plan), "127.0.0.1:50054", "127.0.0.1:8000")


@contextlib.asynccontextmanager
async def gateway(words: Sequence[str]) -> AsyncIterator[tuple[str, ScriptedGateway]]:
    """Serve a ScriptedGateway on a free port."""
    server, servicer = RpcServer("127.0.0.1", 0), ScriptedGateway(words)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server.server)
    await server.start("octavo.v1.InferenceService")
    try:
        yield f"127.0.0.1:{server.port}", servicer
    finally:
        await server.stop(0)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`octavo COMMAND --help` prints a description and exits 0."""
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    name = {"serve": "up"}.get(command, command)
    assert f"usage: octavo {name} [-h]" in capsys.readouterr().out


def test_help_lists_every_command_and_quickly(capsys: pytest.CaptureFixture[str]) -> None:
    """The overview names all commands, and costs no import of torch or transformers."""
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)
    code = (
        "import sys; from octavo.cli import _parser; _parser().format_help(); "
        "assert not {'torch', 'transformers', 'tokenizers', 'huggingface_hub'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


OVERVIEW = "`octavo --help` lists what there is"
UP = "`octavo up --help` lists what there is"


@pytest.mark.parametrize(
    ("argv", "said", "hint"),
    [
        ([], "octavo: error: the following arguments are required: COMMAND", OVERVIEW),
        (["fly"], "octavo: error: there is no command 'fly'", OVERVIEW),
        (["chatt"], "octavo: error: there is no command 'chatt'; did you mean chat?", OVERVIEW),
        (["--verson"], "octavo: error: there is no flag --verson; did you mean --version?", OVERVIEW),
        (["up"], "octavo up: error: the following arguments are required: MODEL", UP),
        (["up", "m", "--executors", "0"], "octavo up: error: --executors: must be a number from 1 to 64", UP),
        (
            ["up", "--kv-memry", "2GiB", "m"],
            "octavo up: error: there is no flag --kv-memry; did you mean --kv-memory?",
            UP,
        ),
        (
            ["up", "m", "--kv-memry=2GiB"],
            "octavo up: error: there is no flag --kv-memry; did you mean --kv-memory?",
            UP,
        ),
        (["up", "m", "--quiet"], "octavo up: error: there is no flag --quiet", UP),
        (
            ["complete", "x", "--temp", "0"],
            "octavo complete: error: there is no flag --temp; did you mean --temperature?",
            "`octavo complete --help` lists what there is",
        ),
        (
            ["load", "--stop", "x"],
            "octavo load: error: there is no flag --stop",
            "`octavo load --help` lists what there is",
        ),
        (["up", "m", "--bin", "x"], "octavo up: error: there is no flag --bin; did you mean --bind?", UP),
        (["up", "a", "b"], "octavo up: error: takes no 'b'", UP),
        (
            ["chat", "hello"],
            "octavo chat: error: takes no 'hello'",
            "`octavo chat` asks for questions; to ask a single one: echo 'QUESTION' | octavo chat",
        ),
    ],
)
def test_bad_usage_is_two_lines_and_exits_with_2(
    argv: list[str], said: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only what is wrong is named, with what was probably meant, of the command that was meant."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", f"{said}\nhint: {hint}\n")


def test_what_looks_like_a_flag_may_be_a_text() -> None:
    """Behind --, with a space in it, or after an equals sign: argparse takes it for a value, and so does the check."""
    assert _parser().parse_args(["complete", "--", "--once"]).prompt == "--once"
    assert _parser().parse_args(["complete", "--once upon"]).prompt == "--once upon"
    assert _parser().parse_args(["chat", "--system=--be brief"]).system == "--be brief"
    assert _parser().parse_args(["complete", "x", "--presence-penalty", "-1"]).presence_penalty == -1


def test_the_version_is_a_flag_too(capsys: pytest.CaptureFixture[str]) -> None:
    """`octavo --version` prints what `octavo version` does."""
    assert main(["version"]) == 0
    said = capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == said


@pytest.mark.parametrize("command", ["pull", "prepare", "up", "demo"])
def test_a_failure_is_one_sentence_and_exit_code_1(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback for what a person can put right."""
    assert main([command, "no-such-model"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("octavo: error: no model 'no-such-model'")
    assert "Traceback" not in captured.err + captured.out


def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where only a gateway is installed, preparing says what to install."""
    for name in ("tqdm", "octavo.models.prepare", "octavo.models.pull"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert main(["prepare", "smollm2-135m-instruct"]) == 1
    assert capsys.readouterr().err == 'octavo: error: tqdm is not installed: pip install "octavo[executor]"\n'


def test_weights_that_are_gone_are_missed_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prepared folder without its weights serves a gateway, not a whole cell."""
    path = write_gguf(tmp_path / "m.gguf", byte_level_metadata())
    assert main(["prepare", str(path)]) == 0
    path.unlink()
    assert main(["up", str(tmp_path / "m.octavo")]) == 1
    assert "m.gguf is missing" in capsys.readouterr().err


def test_prepare_says_where_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints the folder and the revision, and exits 0."""
    path = write_gguf(tmp_path / "m.gguf", byte_level_metadata())
    assert main(["prepare", str(path), "--output", str(tmp_path / "out")]) == 0
    model = open_prepared(str(tmp_path / "out"))
    assert f"prepared m in {tmp_path / 'out'}, revision {model.revision[:12]}" in capsys.readouterr().out


def test_version_names_what_octavo_stands_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Enough for a bug report."""
    assert main(["version"]) == 0
    assert re.search(r"^octavo \d+\.\d+\.\d+\npython 3\.\d+\.\d+\ngrpcio \d", capsys.readouterr().out)


@pytest.mark.asyncio
async def test_the_demo_streams_the_answer_and_says_how_fast_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    """Question, answer and both figures are on the screen; the request is greedy, so it is the same everywhere."""
    async with gateway(["Paris", " is", " it", "."]) as (address, servicer):
        await ask(address, "Which city?")
    out = capsys.readouterr().out
    assert out.startswith("\nyou    Which city?\nmodel  Paris is it.\n")
    assert "5 prompt tokens, 4 tokens written, ended by the model itself" in out
    assert re.search(r"time to first token \d+ ms, then \d+\.\d tokens/s", out)
    (request,) = servicer.requests
    assert request.sampling.HasField("temperature")
    assert request.sampling.temperature == 0.0
    assert [message.content for message in request.chat.messages] == ["Which city?"]


@pytest.mark.asyncio
async def test_a_refusal_of_the_demo_is_a_typed_error() -> None:
    """The gateway's own code and reason come through; the command prints them."""
    async with gateway([]) as (address, _):
        with pytest.raises(ServiceError) as raised:
            await ask(address, "?")
    assert (raised.value.code, raised.value.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_EXECUTOR")


@pytest.mark.asyncio
async def test_the_printed_python_program_runs_as_it_is() -> None:
    """What `octavo up` prints is pasted: it must work against any gateway, and print the answer."""
    async with gateway(["Par", "is"]) as (address, servicer):
        assert python_program(address) in ready_message("m", cell(address))
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            await asyncio.to_thread(exec, python_program(address), {})
    assert out.getvalue() == "Paris\n"
    assert servicer.requests[0].chat.messages[0].role == pb.CHAT_ROLE_USER


def test_the_printed_grpcurl_commands_fit_the_contract() -> None:
    """Shell quoting, method names and JSON fields are right: grpcurl itself is not needed to know."""
    methods = pb.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name
    for purpose, command in grpcurl_commands("127.0.0.1:50051").items():
        words = shlex.split(command)
        assert words[:2] == ["grpcurl", "-plaintext"]
        if "-d" in words:
            message = json_format.Parse(words[words.index("-d") + 1], pb.GenerateRequest())
            assert message.chat.messages[0].role == pb.CHAT_ROLE_USER
            assert words[-1] == f"octavo.v1.InferenceService/{methods['Generate'].name}"
        assert command in ready_message("m", cell("127.0.0.1:50051")), purpose


def test_the_ready_message_names_every_address() -> None:
    """Public API, operator's API and each service's metrics page are there to be copied."""
    message = ready_message("m", cell("127.0.0.1:50051"))
    assert message.startswith("m is served at 127.0.0.1:50051 (gRPC, plaintext).")
    assert "operator's API at 127.0.0.1:50054" in message
    assert re.search(r"gateway +http://127\.0\.0\.1:9101/metrics", message)
    assert re.search(r"executor-0 +http://127\.0\.0\.1:9103/metrics", message)


def test_what_is_printed_can_be_pasted_into_a_shell() -> None:
    """Below the addresses all is comments and commands; the Python program reaches Python as it is."""
    address = "127.0.0.1:50051"
    _, mark, commands = ready_message("m", cell(address)).partition("# talk to it\n")
    assert mark
    subprocess.run(["bash", "-n"], input=commands, text=True, check=True)
    _, mark, last = commands.partition("# the same chat from Python")
    stand_in = f'python() {{ [ "$*" = - ] && cat; }}\n{mark}{last}'
    done = subprocess.run(["bash"], input=stand_in, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == python_program(address)


@pytest.mark.asyncio
async def test_waiting_for_a_service_ends_when_its_health_says_serving() -> None:
    """Neither a listening port nor NOT_SERVING is enough."""
    server = RpcServer("127.0.0.1", 0)
    await server.start()
    waiting = asyncio.create_task(wait_until_serving(f"127.0.0.1:{server.port}"))
    done, _ = await asyncio.wait([waiting], timeout=0.5)
    assert not done
    await server.health.set("", True)
    await asyncio.wait_for(waiting, 30)
    await server.stop(0)
