"""What the `octavo` command makes of wrong flags and variables: bad usage, said before anything is done."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf_samples import byte_level_metadata, write_gguf

from octavo.cli import main
from octavo.models import ModelError, open_prepared


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--kv-memory", "lots"),
        ("--threads", "0"),
        ("--device", "cuda:x"),
        ("--kernels", "gpu"),
        ("--policy", "sjf"),
        ("--cors-origins", "foo"),
        ("--api-keys", "/no/such"),
        ("--chat-template", "/no/such"),
    ],
)
@pytest.mark.parametrize("command", ["up", "demo"])
def test_a_bad_setting_is_bad_usage(
    command: str, flag: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flag of a service is checked by the command itself, before the model is prepared or anything starts: exit
    code 2, as the service would end.
    """
    path = write_gguf(tmp_path / "m.gguf", byte_level_metadata())
    assert main([command, str(path), flag, value]) == 2
    assert f"octavo: error: {flag}" in capsys.readouterr().err
    with pytest.raises(ModelError):
        open_prepared(str(path))


def test_a_bad_variable_is_bad_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A variable is as good as its flag, and a port beyond the last as any other value."""
    model = str(write_gguf(tmp_path / "m.gguf", byte_level_metadata()))
    assert main(["up", model, "--gateway-port", "65536"]) == 2
    monkeypatch.setenv("OCTAVO_THREADS", "x")
    assert main(["up", model]) == 2
    assert "OCTAVO_THREADS='x': must be a whole number" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["load"], ["complete", "x"], ["up", "m"]])
def test_a_bad_key_is_named_by_its_variable_and_not_shown(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be sent stops the command; the key itself is nobody's to read."""
    monkeypatch.setenv("OCTAVO_API_KEY", "bad secret")
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    told = "octavo: error: OCTAVO_API_KEY: must be printable ASCII without spaces\n"
    assert capsys.readouterr() == ("", told)


@pytest.mark.parametrize(
    "argv",
    [
        ["chat"],
        ["complete", "x"],
        ["load"],
        ["kv"],
        ["requests"],
        ["cancel", "1"],
        ["bench"],
        ["health", "127.0.0.1:1"],
        ["pull", "m"],
        ["up", "m"],
        ["version"],
    ],
)
def test_a_misspelt_variable_stops_every_command(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A client would take its default and ask somebody else: it stops with the name and the likely one instead."""
    monkeypatch.setenv("OCTAVO_ADRESS", "127.0.0.1:1")
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    told = "octavo: error: OCTAVO_ADRESS: no Octavo program knows this variable; did you mean OCTAVO_ADDRESS? "
    assert capsys.readouterr() == ("", f"{told}Rename or unset it\n")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("http://127.0.0.1:50051", "host:port without http://, is 'http://127.0.0.1:50051'"),
        ("localhost:99999", "host:port with a port from 1 to 65535, is 'localhost:99999'"),
        ("localhost", "host:port, is 'localhost'"),
    ],
)
def test_an_address_that_is_none_is_told_apart(
    address: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A scheme before it and a port beyond the last are named as such, from flag and variable alike."""
    with pytest.raises(SystemExit):
        main(["chat", "--address", address])
    assert f"--address: must be {words}" in capsys.readouterr().err
    monkeypatch.setenv("OCTAVO_ADDRESS", address)
    # A command that does not ask there stops too: else it would tell of another cell than the one that was meant.
    for argv in (["complete", "x"], ["load"]):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        assert ended.value.code == 2
        assert f"OCTAVO_ADDRESS: must be {words}" in capsys.readouterr().err
