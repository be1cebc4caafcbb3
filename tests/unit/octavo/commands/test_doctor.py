"""`octavo doctor`: each line tells the truth of a machine that the test makes, and what to do."""

from __future__ import annotations

import asyncio
import hashlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import pytest
from fake_gateway import FakeGateway
from prometheus_client import CollectorRegistry, Counter, start_wsgi_server

from octavo.cli import main
from octavo.client.discovery import ADMIN, GATEWAY, Api, local_addresses
from octavo.commands.doctor import report
from octavo.models.catalog import DEFAULT_MODEL
from octavo.models.location import models_folder
from octavo.models.manifest import GenerationConfig, Manifest, WeightFile, revision_of, write_files
from octavo.rpc.settings import variable_of
from octavo.settings import GatewaySettings
from octavo.terminal.checks import ports, software
from octavo.terminal.checks.finding import Finding, Level
from octavo.terminal.checks.listeners import listener_of
from octavo.terminal.checks.machine import check_machine
from octavo.terminal.checks.models import check_models
from octavo.terminal.checks.ports import EXECUTOR, PortUse, check_ports, check_services, ports_of, services_of
from octavo.terminal.checks.software import check_software
from octavo.terminal.checks.variables import check_variables
from octavo.terminal.style import Style
from octavo.terminal.suggestion import model_to_serve, with_model

MEMINFO = "MemTotal: {total} kB\nMemFree: 1 kB\nMemAvailable: {available} kB\n"


def machine(root: Path, *, flags: str, total: int, available: int, limit: str | None = None) -> Path:
    """Write the /proc and /sys of a machine; memory in MiB."""
    (root / "proc").mkdir(parents=True)
    (root / "proc/cpuinfo").write_text(f"processor : 0\nmodel name : any\nflags : {flags}\n")
    (root / "proc/meminfo").write_text(MEMINFO.format(total=total * 1024, available=available * 1024))
    if limit is not None:
        (root / "sys/fs/cgroup").mkdir(parents=True)
        (root / "sys/fs/cgroup/memory.max").write_text(f"{limit}\n")
    return root


def write_model(folder: Path) -> None:
    """Write weights, and beside them what preparing them leaves."""
    weights, tokenizer = b"weights", b"{}"
    file = WeightFile("model.safetensors", len(weights), hashlib.sha256(weights).hexdigest())
    digest = hashlib.sha256(tokenizer).hexdigest()
    (folder / "octavo").mkdir(parents=True)
    (folder / file.name).write_bytes(weights)
    generation = GenerationConfig(eos_token_ids=(2,))
    revision = revision_of((file,), tokenizer, None, generation)
    manifest = Manifest("m", revision, digest, "..", (file,), vocab_size=8, max_position_embeddings=8)
    write_files(folder / "octavo", manifest, tokenizer, None, generation)


def by_subject(findings: Sequence[Finding]) -> dict[str, Finding]:
    """Return findings by what they are about; each subject has one."""
    found = {finding.subject: finding for finding in findings}
    assert len(found) == len(findings)
    return found


@pytest.mark.parametrize(
    ("flags", "named", "dtype", "level"),
    [
        ("fpu avx2 avx512f avx512_bf16 amx_bf16", "AVX2, AVX-512, AVX-512 BF16, AMX BF16", "bfloat16", Level.OK),
        ("fpu avx avx2", "AVX2", "float32", Level.OK),
        ("fpu sse2", "", "float32", Level.NOTE),
    ],
)
def test_the_cpu_is_told_by_what_matters(
    tmp_path: Path, home: Path, flags: str, named: str, dtype: str, level: Level
) -> None:
    """Instruction sets by their usual names, and the dtype that follows; without vectors it is a note."""
    root = machine(tmp_path / "root", flags=flags, total=8000, available=7000)
    cpu = by_subject(list(check_machine(home, root)))["cpu"]
    assert cpu.level is level
    assert named in cpu.text
    assert f"--dtype auto takes {dtype}" in cpu.text


@pytest.mark.parametrize(
    ("available", "limit", "level"),
    [
        (7000, None, Level.OK),
        (7000, "max", Level.OK),
        (1000, None, Level.NOTE),
        (100, None, Level.PROBLEM),
        (7000, str(300 << 20), Level.PROBLEM),
        (7000, str(1 << 30), Level.NOTE),
    ],
)
def test_memory_is_what_this_process_may_take(
    tmp_path: Path, home: Path, available: int, limit: str | None, level: Level
) -> None:
    """The container's limit counts as much as the machine's memory."""
    root = machine(tmp_path / "root", flags="avx2", total=8000, available=available, limit=limit)
    memory = by_subject(list(check_machine(home, root)))["memory"]
    assert memory.level is level
    assert (memory.advice is None) == (level is Level.OK)


def test_a_machine_without_proc_is_no_failure(tmp_path: Path, home: Path) -> None:
    """What cannot be known is said so."""
    assert by_subject(list(check_machine(home, tmp_path / "nothing")))["memory"].level is Level.NOTE


def test_a_home_that_is_no_folder_is_a_problem(tmp_path: Path) -> None:
    """Models and logs need a place; the advice names the variable."""
    (tmp_path / "file").touch()
    disk = by_subject(list(check_machine(tmp_path / "file")))["disk"]
    assert disk.level is Level.PROBLEM
    assert "OCTAVO_HOME" in (disk.advice or "")


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """What serving needs is a problem, what only a tool needs is a note; nothing is imported to know."""
    wanted = ['tokenizers>=0.22; extra == "gateway"', 'torch>=2; extra == "executor"', 'no-httpx; extra == "bench"']
    monkeypatch.setattr(metadata, "requires", lambda name: ["grpcio>=1", *wanted])
    present = {"octavo": "1.0", "grpcio": "1.78", "tokenizers": "0.23"}
    monkeypatch.setattr(software, "version_of", present.get)
    found = by_subject(list(check_software()))
    assert found["octavo"].text == "octavo 1.0, grpcio 1.78"
    assert (found["gateway"].level, found["gateway"].text) == (Level.OK, "tokenizers 0.23")
    assert (found["executor"].level, found["executor"].advice) == (Level.PROBLEM, 'pip install "octavo[executor]"')
    assert "torch is not installed" in found["executor"].text
    assert (found["bench"].level, found["bench"].advice) == (Level.NOTE, 'pip install "octavo[bench]"')


def test_no_check_imports_torch() -> None:
    """The doctor must answer fast, and where torch is broken."""
    code = (
        "import os, sys; from pathlib import Path; from octavo.terminal.checks.everything import check_everything; "
        "check_everything(Path(sys.argv[1]), {}); "
        "assert not {'torch', 'transformers', 'tokenizers', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, os.environ["OCTAVO_HOME"]], check=True, timeout=60)


def test_a_tool_that_fails_counts_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A docker without compose is no docker compose; an old docker-compose is one, where its engine answers."""
    docker, compose = tmp_path / "docker", tmp_path / "docker-compose"
    monkeypatch.setenv("PATH", str(tmp_path))
    docker.write_text(f"#!{sys.executable}\nraise SystemExit(1)\n")
    docker.chmod(0o755)
    assert by_subject(list(check_software()))["compose"].level is Level.NOTE
    compose.write_text(f"#!{sys.executable}\nprint('1.29.2')\n")
    compose.chmod(0o755)
    found = by_subject(list(check_software()))
    assert (found["compose"].level, found["compose"].text) == (Level.OK, "docker-compose 1.29.2, whose engine answers")
    compose.write_text(f"#!{sys.executable}\nimport sys\n'ps' in sys.argv and sys.exit('no socket')\nprint('5.6.1')\n")
    found = by_subject(list(check_software()))
    expected = (Level.NOTE, "docker-compose 5.6.1, but no container engine answers")
    assert (found["compose"].level, found["compose"].text) == expected
    assert found["compiler"].level is Level.NOTE


def test_models_are_found_in_every_state(home: Path) -> None:
    """Prepared, fetched, half fetched and damaged are told apart, each with the command that helps."""
    models = models_folder(home)
    assert by_subject(list(check_models(home, {})))["none"].advice.startswith(f"octavo pull {DEFAULT_MODEL}")  # type: ignore[union-attr]
    whole, damaged, bare, half = (models / name for name in ("a--whole", "a--damaged", "a--bare", DEFAULT_MODEL))
    for folder in (bare, half):
        folder.mkdir(parents=True)
    for folder in (whole, damaged):
        write_model(folder)
    (damaged / "octavo/tokenizer.json").write_text("{ }")
    found = by_subject(list(check_models(home, {})))
    assert (found["a/whole"].level, found["a/whole"].advice) == (Level.OK, "octavo up a/whole")
    assert (found["a/damaged"].level, found["a/damaged"].advice) == (Level.PROBLEM, "octavo prepare a/damaged")
    assert (found["a/bare"].level, found["a/bare"].text) == (Level.NOTE, "fetched, not prepared")
    assert (found[DEFAULT_MODEL].level, found[DEFAULT_MODEL].advice) == (Level.NOTE, f"octavo pull {DEFAULT_MODEL}")
    (whole / "model.safetensors").unlink()
    assert by_subject(list(check_models(home, {})))["a/whole"].level is Level.PROBLEM


def test_hints_name_a_model_that_is_prepared_here(home: Path) -> None:
    """What is to be typed can be pasted: the default before others, and without any the default as well."""
    assert with_model("`octavo up MODEL` starts a cell") == f"`octavo up {DEFAULT_MODEL}` starts a cell"
    (models_folder(home) / "a--bare").mkdir(parents=True)
    write_model(models_folder(home) / "b--whole")
    assert model_to_serve(home) == "b/whole"
    assert with_model("`octavo up MODEL` starts a cell") == "`octavo up b/whole` starts a cell"
    (models_folder(home) / DEFAULT_MODEL).mkdir()
    assert model_to_serve(home) == "b/whole"


@pytest.mark.parametrize(
    ("name", "meant"), [("smollm2-135m-instuct", DEFAULT_MODEL), ("smol", DEFAULT_MODEL), ("b-whole", "b/whole")]
)
def test_a_misspelt_model_is_told_with_what_was_meant(
    home: Path, name: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Models of the catalog and those that were fetched are known; anything else is like none."""
    write_model(models_folder(home) / "b--whole")
    assert main(["up", name]) == 1
    assert capsys.readouterr().err.endswith(f"; did you mean {meant}?\n")
    assert main(["up", "quite-another"]) == 1
    assert "did you mean" not in capsys.readouterr().err


def test_up_says_that_a_cell_runs_already(home: Path, gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """Its port is most often taken by an earlier `octavo up`: how to use that cell is said, with every taken port."""
    write_model(models_folder(home) / "b--whole")
    ports = [address.rpartition(":")[2] for address in (gateway.address, gateway.admin_address)]
    flags = ["--scheduler-port", "0", "--executor-port", "0", "--metrics-port", "0"]
    assert main(["up", "b/whole", "--gateway-port", ports[0], "--admin-port", ports[1], *flags]) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert all(f"127.0.0.1:{port} (" in error for port in ports)
    assert hint.startswith(f"hint: a cell of Octavo runs here already: `octavo chat --address {gateway.address}` talks")


def test_the_model_of_the_variable_is_looked_at_too(home: Path) -> None:
    """Services started by hand take OCTAVO_MODEL: a path that is none is a problem."""
    found = by_subject(list(check_models(home, {"OCTAVO_MODEL": "/no/such.gguf"})))
    assert found["/no/such.gguf"].level is Level.PROBLEM


def test_every_wrong_variable_is_named() -> None:
    """A misspelt one with its likely name, a bad value with what it wants; good ones are listed."""
    environ = {"OCTAVO_DEPHT": "2", "OCTAVO_DTYPE": "int3", "OCTAVO_ADDRESS": "here", "OCTAVO_DEPTH": "1", "HOME": "/"}
    environ["OCTAVO_API_KEY"] = "bad secret"
    found = by_subject(list(check_variables(environ)))
    assert found["OCTAVO_DEPHT"].advice == "did you mean OCTAVO_DEPTH? Rename or unset it"
    assert "must be one of auto, float32, bfloat16" in found["OCTAVO_DTYPE"].text
    assert "must be host:port" in found["OCTAVO_ADDRESS"].text
    assert found["OCTAVO_API_KEY"].text == "OCTAVO_API_KEY: must be printable ASCII without spaces"
    assert found["variables"].text == "OCTAVO_DEPTH"
    assert [each.level for each in found.values()].count(Level.PROBLEM) == 4
    assert by_subject(list(check_variables({})))["variables"].level is Level.OK


def test_the_ports_asked_are_those_of_the_variables() -> None:
    """Another port by a variable is another port to look at; a free one chosen at the start is none."""
    port, bind = variable_of(GatewaySettings, "port"), variable_of(GatewaySettings, "bind")
    uses = {use.subject: use for use in ports_of({port: "7", bind: "0.0.0.0", "OCTAVO_ADMIN_PORT": "0"})}
    assert uses["gateway"].address == "127.0.0.1:7"
    assert "admin" not in uses
    assert uses["executor"].address == "127.0.0.1:50053"
    bad = {use.subject: use for use in ports_of({port: "x"})}
    assert bad["gateway"].port == 50051


def look_at(*uses: PortUse) -> list[Finding]:
    """Check ports."""
    return asyncio.run(check_ports(list(uses)))


def test_a_free_port_and_one_of_another_program_are_told_apart(foreign_page: int) -> None:
    """What is in the way is named with its process, and the flag that goes round it."""
    (taken,) = look_at(PortUse("gateway", "127.0.0.1", foreign_page, "--gateway-port", GATEWAY))
    assert taken.level is Level.PROBLEM
    assert f"(pid {os.getpid()}), which is no service of Octavo" in taken.text
    assert "octavo up --gateway-port 0" in (taken.advice or "")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    (free,) = look_at(PortUse("gateway", "127.0.0.1", port, "--gateway-port", GATEWAY))
    assert (free.level, free.text) == (Level.OK, "free")
    assert listener_of(port) is None


@pytest.mark.parametrize("api", [GATEWAY, None])
def test_a_port_that_is_silent_is_nobody_elses(api: Api | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service of Octavo's that is busy or halted says nothing: it is not called foreign, nor to be stopped."""
    monkeypatch.setattr(ports, "_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as halted:
        port = halted.getsockname()[1]
        (silent,) = look_at(PortUse("gateway", "127.0.0.1", port, "--gateway-port", api))
        services = asyncio.run(check_services({GATEWAY: [f"127.0.0.1:{port}"]}))
    assert silent.level is Level.NOTE
    assert f"(pid {os.getpid()}), which does not answer within 2 s" in silent.text
    assert "repeat this" in (silent.advice or "")
    assert "stop" not in (silent.advice or "")
    assert [(each.subject, each.level) for each in services] == [(f"gateway 127.0.0.1:{port}", Level.NOTE)]


def test_services_are_looked_for_where_the_variables_say() -> None:
    """Ports and addresses of the variables before the usual ones, each once; one that is none is not asked."""
    port = variable_of(GatewaySettings, "port")
    asked = services_of({port: "7", "OCTAVO_ADDRESS": "far:8", "OCTAVO_ADMIN_ADDRESS": "nonsense"})
    assert asked[GATEWAY] == ["127.0.0.1:7", "far:8", *local_addresses(GATEWAY)]
    assert asked[ADMIN] == local_addresses(ADMIN)


def test_a_port_of_octavos_own_is_known_by_its_health(gateway: FakeGateway) -> None:
    """The right service on a port is well; another of Octavo's there is worth a note."""
    ports = [int(address.rpartition(":")[2]) for address in (gateway.address, gateway.admin_address)]
    right, wrong = look_at(
        PortUse("gateway", "127.0.0.1", ports[0], "--gateway-port", GATEWAY),
        PortUse("executor", "127.0.0.1", ports[1], "--executor-port", EXECUTOR),
    )
    assert (right.level, right.text) == (Level.OK, "taken by a gateway of Octavo, which serves")
    assert (wrong.level, wrong.text) == (Level.NOTE, "taken by a gateway's admin port of Octavo, which serves")


@pytest.fixture
def foreign_page() -> Iterator[int]:
    """A web server that has nothing to do with Octavo."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        server.RequestHandlerClass.log_message = lambda *args: None  # type: ignore[method-assign]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_a_metrics_page_is_told_from_any_other(foreign_page: int) -> None:
    """A page counts where it has Octavo's series."""
    registry = CollectorRegistry()
    Counter("octavo_things", "Counted for this test.", registry=registry)
    server, thread = start_wsgi_server(0, "127.0.0.1", registry)
    try:
        own, other = look_at(
            PortUse("gateway metrics", "127.0.0.1", server.server_port, "--metrics-port"),
            PortUse("executor metrics", "127.0.0.1", foreign_page, "--metrics-port"),
        )
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert (own.level, other.level) == (Level.OK, Level.PROBLEM)


def test_services_are_told_with_what_they_serve(gateway: FakeGateway) -> None:
    """A gateway by its models, its admin port by the commands that use it; none is a note."""
    asked = {GATEWAY: [gateway.address, "127.0.0.1:1"], ADMIN: [gateway.admin_address]}
    found = by_subject(asyncio.run(check_services(asked)))
    assert found[f"gateway {gateway.address}"].text == "serves m (1 executor ready)"
    assert "octavo load" in found[f"admin {gateway.admin_address}"].text
    (none,) = asyncio.run(check_services({GATEWAY: ["127.0.0.1:1"]}))
    assert (none.subject, none.level) == ("none", Level.NOTE)


def test_the_report_gives_a_line_a_finding_and_the_verdict() -> None:
    """Sections, aligned subjects, the advice below; colours are nobody's business in a pipe."""
    findings = [
        Finding("machine", "cpu", Level.OK, "2 cores"),
        Finding("machine", "memory", Level.PROBLEM, "little", "buy some"),
        Finding("ports", "1", Level.NOTE, "odd"),
    ]
    with Path(os.devnull).open("w") as stream:
        lines = report(findings, Style(stream)).splitlines()
    assert lines == [
        "machine",
        "  ok       cpu     2 cores",
        "  problem  memory  little",
        "                   -> buy some",
        "ports",
        "  note     1  odd",
        "",
        "1 problem, 1 note: put right what is marked `problem` first",
    ]


def test_the_exit_code_is_1_where_a_problem_prevents_serving(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same in JSON, which has every finding with its level and advice."""
    monkeypatch.setenv("OCTAVO_DEPHT", "2")
    assert main(["doctor", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["problems"] >= 1
    (finding,) = [each for each in told["findings"] if each["subject"] == "OCTAVO_DEPHT"]
    assert finding["level"] == "problem"
    assert finding.keys() == {"section", "subject", "level", "text", "advice"}
    findings = [Finding("machine", "cpu", Level.NOTE, "slow")]
    monkeypatch.setattr("octavo.terminal.checks.everything.check_everything", lambda home, environ: findings)
    assert main(["doctor"]) == 0
    assert "0 problems, 1 note: this machine can serve" in capsys.readouterr().out
