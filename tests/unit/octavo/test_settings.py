"""Settings: flags over variables over defaults, and a clear end for anything wrong."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from octavo.rpc.settings import Settings, SettingsError, parse_bytes, read, variable_of
from octavo.settings import (
    ALL_SETTINGS,
    ExecutorSettings,
    GatewaySettings,
    SchedulerSettings,
    known_variables,
    load,
)

KNOWN = known_variables()


def test_defaults_are_the_documented_ports_and_loopback() -> None:
    """Without flags or variables a service listens on its documented port on 127.0.0.1."""
    assert read(SchedulerSettings, [], {}, KNOWN).port == 50052
    assert read(GatewaySettings, ["--model", "m"], {}, KNOWN).port == 50051
    executor = read(ExecutorSettings, ["--model", "m"], {}, KNOWN)
    assert (executor.port, executor.bind, executor.block_size) == (50053, "127.0.0.1", 16)


def test_flag_wins_over_variable_wins_over_default() -> None:
    """Each source yields to the one above it."""
    environ = {"OCTAVO_SCHEDULER_PORT": "6000", "OCTAVO_DEPTH": "3"}
    settings = read(SchedulerSettings, ["--port", "7000"], environ, KNOWN)
    assert (settings.port, settings.depth) == (7000, 3)


def test_ports_and_addresses_carry_the_program_name_in_their_variable() -> None:
    """Three services on one machine can share an environment."""
    assert variable_of(GatewaySettings, "port") == "OCTAVO_GATEWAY_PORT"
    assert variable_of(ExecutorSettings, "bind") == "OCTAVO_EXECUTOR_BIND"
    assert variable_of(GatewaySettings, "model") == variable_of(ExecutorSettings, "model") == "OCTAVO_MODEL"


def test_another_programs_variable_is_ignored() -> None:
    """The scheduler does not mind the executor's variables."""
    assert read(SchedulerSettings, [], {"OCTAVO_BLOCK_SIZE": "32"}, KNOWN).depth == 2


def test_unknown_variable_stops_with_its_name() -> None:
    """A misspelt OCTAVO_* variable is an error, not a silent default."""
    with pytest.raises(SettingsError, match="OCTAVO_DETPH"):
        read(SchedulerSettings, [], {"OCTAVO_DETPH": "3"}, KNOWN)


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        (["--depth", "x"], {}, r"--depth='x': must be a whole number"),
        (["--depth", "0"], {}, r"--depth='0': must be at least 1"),
        (["--depth", "9"], {}, r"--depth='9': must be at most 8"),
        ([], {"OCTAVO_DEPTH": "two"}, r"OCTAVO_DEPTH='two'"),
        (["--orphan-timeout", "nan"], {}, r"--orphan-timeout='nan': must be a finite number"),
        (["--log-level", "loud"], {}, r"--log-level='loud': must be one of debug, info"),
        (["--check-invariants", "maybe"], {}, r"must be true or false"),
        (["--port", "70000"], {}, r"--port='70000': must be at most 65535"),
        (["--dept", "1"], {}, r"unrecognized arguments: --dept"),
    ],
)
def test_bad_value_names_its_source(argv: list[str], environ: dict[str, str], words: str) -> None:
    """A bad value is refused with the flag or variable it came from and what is wanted."""
    with pytest.raises(SettingsError, match=words):
        read(SchedulerSettings, argv, environ, KNOWN)


@pytest.mark.parametrize(
    ("settings", "argv", "words"),
    [
        (SchedulerSettings, ["--policy", "sjf"], r"--policy='sjf': must be one of fcfs, .*, or package.module:Class"),
        (SchedulerSettings, ["--policy", "a.b:"], "--policy='a.b:'"),
        (SchedulerSettings, ["--executors", "foo"], r"--executors='foo': must be host:port.*; 'foo' is not host:port"),
        (SchedulerSettings, ["--executors", "a:1,http://b:2"], "'http://b:2' is not host:port without http://"),
        (SchedulerSettings, ["--executors", " , "], "--executors=' , ': must be host:port"),
        (GatewaySettings, ["--cors-origins", "foo"], "--cors-origins='foo': must be .* such as https://example.org"),
        (GatewaySettings, ["--cors-origins", "https://a.org/"], "--cors-origins='https://a.org/'"),
        (GatewaySettings, ["--cors-origins", "https://A.org"], "--cors-origins"),
        (GatewaySettings, ["--api-keys", "/no/such"], "--api-keys='/no/such': must be a file that can be read"),
        (GatewaySettings, ["--chat-template", "/"], "--chat-template='/': must be a file that can be read"),
        (ExecutorSettings, ["--device", "gpu"], "--device='gpu': must be one of cpu, cuda"),
        (ExecutorSettings, ["--kernels", "gpu"], "--kernels='gpu': must be one of reference, cpu, triton"),
    ],
)
def test_names_that_nothing_has_are_refused(settings: type[Settings], argv: list[str], words: str) -> None:
    """By the flag and with what there is, by whoever reads the settings: the service, or what starts it."""
    given = argv if settings is SchedulerSettings else [*argv, "--model", "m"]
    with pytest.raises(SettingsError, match=words):
        read(settings, given, {}, KNOWN)


def test_names_that_something_has_are_taken(tmp_path: Path) -> None:
    """Policies of the user's own, lists of addresses with a space or an end too many, origins of every kind, files."""
    (tmp_path / "keys").touch()
    scheduler = read(SchedulerSettings, ["--policy", "my.own:Policy", "--executors", "a:1, [::1]:2,"], {}, KNOWN)
    assert (scheduler.policy, scheduler.executors) == ("my.own:Policy", "a:1, [::1]:2,")
    origins = "https://a.org,http://localhost:3000,http://[::1]:1,chrome-extension://abc,*"
    flags = ["--model", "m", "--cors-origins", origins, "--api-keys", str(tmp_path / "keys")]
    gateway = read(GatewaySettings, flags, {}, KNOWN)
    assert (gateway.cors_origins, gateway.api_keys) == (tuple(origins.split(",")), str(tmp_path / "keys"))


@pytest.mark.parametrize("flag", ["--max-num-batched-tokens", "--threads", "--max-num-seqs", "--block-size"])
def test_sizes_beyond_any_machine_are_refused(flag: str) -> None:
    """A number that no field of the contract or no system call can take stops the executor at its start, by name."""
    with pytest.raises(SettingsError, match=f"{flag}='4294967296': must be at most"):
        read(ExecutorSettings, ["--model", "m", flag, "4294967296"], {}, KNOWN)


def test_required_setting_names_flag_and_variable() -> None:
    """A missing required setting says both ways of giving it."""
    with pytest.raises(SettingsError, match=r"--model \(or OCTAVO_MODEL\) is required"):
        read(GatewaySettings, [], {}, KNOWN)


def test_load_ends_the_process_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    """At the edge an error is one line on stderr and exit code 2."""
    with pytest.raises(SystemExit) as ended:
        load(SchedulerSettings, ["--depth", "x"], {})
    assert ended.value.code == 2
    assert capsys.readouterr().err == "scheduler: error: --depth='x': must be a whole number\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [("1024", 1024), ("1KiB", 1024), ("4GiB", 4 * 2**30), ("2GB", 2 * 10**9), ("1.5 MiB", 3 * 2**19), ("7b", 7)],
)
def test_sizes(text: str, value: int) -> None:
    """Sizes are read in binary and decimal units."""
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "GiB", "4 apples", "-1", "1e9", "9" * 400, "9999999TiB", "8388608TiB"])
def test_bad_sizes(text: str) -> None:
    """What is no size is refused with an example of one."""
    with pytest.raises(ValueError, match="512MiB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["scheduler:50052", "[::1]:1", "10.0.0.1:65535"])
def test_addresses(text: str) -> None:
    """An address to dial is kept as it was given."""
    assert read(GatewaySettings, ["--model", "m", "--scheduler", text], {}, KNOWN).scheduler == text


@pytest.mark.parametrize("text", ["", "nonsense", ":1", " :1", "a b:1", "a:", "a:0", "a:65536", "a:x", "a:-1"])
def test_bad_addresses(text: str) -> None:
    """What cannot be dialled stops the gateway at its start: the transport would try it for ever, in silence."""
    with pytest.raises(SettingsError, match=r"--scheduler=.*host:port"):
        read(GatewaySettings, ["--model", "m", "--scheduler", text], {}, KNOWN)


@pytest.mark.parametrize("settings_class", ALL_SETTINGS)
@pytest.mark.parametrize("text", ["", " ", "127.0.0.1 ", "a\nb"])
def test_an_empty_address_is_not_every_address(settings_class: type[Settings], text: str) -> None:
    """`--bind "$ADDRESS"` of a variable that is not set would listen to the whole network."""
    variable = variable_of(settings_class, "bind")
    given = [] if settings_class is SchedulerSettings else ["--model", "m"]
    for argv, environ in ((["--bind", text], {}), ([], {variable: text})):
        with pytest.raises(SettingsError, match=rf"(--bind|{variable})=.*must be an address such as 127.0.0.1"):
            read(settings_class, [*given, *argv], environ, KNOWN)
    assert read(settings_class, [*given, "--bind", "[::]"], {}, KNOWN).bind == "[::]"  # type: ignore[attr-defined]


def test_switch_needs_no_value() -> None:
    """A boolean flag alone means true."""
    assert read(SchedulerSettings, ["--check-invariants"], {}, KNOWN).check_invariants is True


@pytest.mark.parametrize("settings_class", ALL_SETTINGS)
def test_help_lists_every_flag_and_variable(settings_class: type, capsys: pytest.CaptureFixture[str]) -> None:
    """--help is complete."""
    with pytest.raises(SystemExit):
        read(settings_class, ["--help"], {}, KNOWN)
    text = capsys.readouterr().out
    for each in dataclasses.fields(settings_class):
        assert "--" + each.name.replace("_", "-") in text
        assert variable_of(settings_class, each.name) in text.replace("\n", " ")


@pytest.mark.parametrize(
    ("argv", "environ", "seconds"),
    [
        ([], {}, None),
        (["--log-memory-usage"], {}, 10.0),
        (["--log_memory_usage"], {"OCTAVO_LOG_MEMORY_USAGE": "3"}, 10.0),
        (["--log-memory-usage", "--depth", "1"], {}, 10.0),
        (["--log_memory_usage", "2.5"], {}, 2.5),
        (["--log-memory-usage=60"], {}, 60.0),
        ([], {"OCTAVO_LOG_MEMORY_USAGE": "3"}, 3.0),
    ],
)
def test_memory_is_logged_as_asked_for(argv: list[str], environ: dict[str, str], seconds: float | None) -> None:
    """Either spelling of the flag, alone or with seconds, and the variable; without any it is off."""
    assert read(SchedulerSettings, argv, environ, KNOWN).log_memory_usage == seconds


@pytest.mark.parametrize("text", ["0", "-1", "true", "nan", "1e9"])
def test_memory_is_logged_at_sensible_intervals(text: str) -> None:
    """What is no number of seconds, or too few or many, is refused with the flag's name."""
    with pytest.raises(SettingsError, match="--log-memory-usage"):
        read(SchedulerSettings, [f"--log_memory_usage={text}"], {}, KNOWN)
