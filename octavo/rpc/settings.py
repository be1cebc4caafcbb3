"""Settings: a frozen dataclass per program, read once at the edge from flags and environment.

A flag wins over its variable, a variable over the default. Anything wrong ends the process with the name of the flag or
variable and what it wants: a setting that is quietly ignored is found much later, by its effects.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, TypeVar

from octavo.spelling import closest

PREFIX = "OCTAVO_"
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off", ""}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B?|B)?", re.IGNORECASE)


class SettingsError(Exception):
    """A flag or variable that cannot be used; the message names it."""


class Settings:
    """Base of the programs' settings. `program` is the name in variables of ports and addresses, and in messages."""

    program: ClassVar[str]


SettingsType = TypeVar("SettingsType", bound=Settings)


@dataclass(frozen=True)
class _Meta:
    help: str
    per_program: bool
    parse: Callable[[str], Any] | None
    choices: tuple[str, ...] | None
    least: float | None
    most: float | None
    alone: str | None
    aliases: tuple[str, ...]


def setting(
    default: Any = dataclasses.MISSING,
    *,
    help: str,  # noqa: A002 - argparse's own word
    per_program: bool = False,
    parse: Callable[[str], Any] | None = None,
    choices: tuple[str, ...] | None = None,
    least: float | None = None,
    most: float | None = None,
    alone: str | None = None,
    aliases: tuple[str, ...] = (),
) -> Any:
    """Declare a field of a settings class.

    `per_program`: its variable carries the program's name (OCTAVO_GATEWAY_PORT), since programs on one machine differ
    in it; else all programs share the variable (OCTAVO_MODEL). `parse` turns the text into the value and raises
    ValueError with what it wants; without it the field's type does. `least` and `most` bound numbers. `alone` is what
    the flag without a value stands for, `aliases` are further spellings of it. Without a default the setting is
    required.
    """
    if default is False:
        alone = "true"
    meta = _Meta(help, per_program, parse, choices, least, most, alone, aliases)
    return field(default=default, metadata={"octavo": meta})


def parse_bytes(text: str) -> int:
    """Return a number of bytes from `1073741824`, `512MiB` or `4GB`."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise ValueError("a size such as 512MiB or 4GiB")
    unit = (match[2] or "B").upper().removesuffix("B")
    base = 1024 if unit.endswith("I") else 1000
    size = float(match[1]) * base ** " KMGT".index(unit[0] if unit else " ")
    if size >= 2**63:
        raise ValueError("a size such as 512MiB or 4GiB, below 8 EiB")
    return int(size)


def parse_bind(text: str) -> str:
    """Return the address to listen on as it is. An empty one, of a variable that is not set, would be every address."""
    if not text or not text.isprintable() or " " in text:
        raise ValueError("an address such as 127.0.0.1; 0.0.0.0 or [::] is every one")
    return text


def parse_address(text: str) -> str:
    """Return the address of a service to dial, `host:port` or `[host]:port`, as it was given."""
    scheme, is_url, _ = text.partition("://")
    if is_url:
        raise ValueError(f"host:port without {scheme}://")
    host, _, port = text.rpartition(":")
    # Nothing but printable text: no line ends, no bytes that the environment could not decode.
    if not (host and host.isprintable() and port.isascii() and port.isdecimal()) or " " in host:
        raise ValueError("host:port")
    if len(port) > 5 or not 0 < int(port) < 65536:
        raise ValueError("host:port with a port from 1 to 65535")
    return text


def parse_api_key(text: str) -> str:
    """Return an API key as it is, such as can be sent in a header."""
    if not (text and text.isascii() and text.isprintable() and " " not in text):
        raise ValueError("printable ASCII without spaces")
    return text


def variable_of(settings_class: type[Settings], name: str) -> str:
    """Return the environment variable of a field."""
    for each in fields_of(settings_class):
        if each.name == name:
            middle = f"{settings_class.program.upper()}_" if _meta(each).per_program else ""
            return f"{PREFIX}{middle}{name.upper()}"
    raise KeyError(name)


def variables_of(settings_class: type[Settings]) -> frozenset[str]:
    """Return the environment variables that a program knows."""
    return frozenset(variable_of(settings_class, each.name) for each in fields_of(settings_class))


def unknown_variables(environ: Mapping[str, str], known_variables: frozenset[str]) -> list[str]:
    """Return the OCTAVO_* variables that no program knows, sorted: misspelt ones."""
    return sorted(name for name in environ if name.startswith(PREFIX) and name not in known_variables)


def advice_on_variable(name: str, known_variables: frozenset[str]) -> str:
    """Return what to do about a variable that no program knows."""
    meant = closest(name, known_variables)
    return f"did you mean {meant}? Rename or unset it" if meant else "unset it"


def check_variable_names(environ: Mapping[str, str], known_variables: frozenset[str]) -> None:
    """Raise SettingsError, with the name and what was probably meant, for the first variable that no program knows."""
    for name in unknown_variables(environ, known_variables):
        advice = advice_on_variable(name, known_variables)
        raise SettingsError(f"{name}: no Octavo program knows this variable; {advice}")


def read(
    settings_class: type[SettingsType],
    argv: Sequence[str],
    environ: Mapping[str, str],
    known_variables: frozenset[str],
) -> SettingsType:
    """Return the settings.

    `known_variables` are those of every program: an OCTAVO_* variable outside it is a misspelling and an error, another
    program's is ignored. Raises SettingsError; `--help` prints and exits as argparse does.
    """
    check_variable_names(environ, known_variables)
    texts = vars(_parser(settings_class).parse_args(argv))
    values: dict[str, Any] = {}
    for each in fields_of(settings_class):
        variable = variable_of(settings_class, each.name)
        flag = _flag(each.name)
        if texts[each.name] is not None:
            values[each.name] = _value(settings_class, each, texts[each.name], flag)
        elif variable in environ:
            values[each.name] = _value(settings_class, each, environ[variable], variable)
        elif each.default is dataclasses.MISSING:
            raise SettingsError(f"{flag} (or {variable}) is required: {_meta(each).help}")
    return settings_class(**values)


def refuse_start(program: str, error: Exception) -> int:
    """Say why a program does not start, as argparse says it, in one line on stderr; return its exit code, 2."""
    print(f"{program}: error: {error}", file=sys.stderr)
    return 2


def stop_with(program: str, error: Exception) -> NoReturn:
    """End the process with a setting's error; see refuse_start."""
    raise SystemExit(refuse_start(program, error))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message} (--help lists the flags)")


def _parser(settings_class: type[Settings]) -> argparse.ArgumentParser:
    parser = _Parser(prog=settings_class.program, description=settings_class.__doc__, allow_abbrev=False)
    for each in fields_of(settings_class):
        meta = _meta(each)
        note = f"{meta.help} [{variable_of(settings_class, each.name)}"
        required = each.default is dataclasses.MISSING
        note += "; required]" if required else f"; default: {'none' if each.default is None else each.default}]"
        extra: dict[str, Any] = {} if meta.alone is None else {"nargs": "?", "const": meta.alone}
        note = note.replace("%", "%%")
        flags = _flag(each.name), *meta.aliases
        parser.add_argument(*flags, dest=each.name, help=note, metavar=each.name.upper(), **extra)
    return parser


def _value(settings_class: type[Settings], each: dataclasses.Field[Any], text: str, source: str) -> Any:
    meta = _meta(each)
    if meta.choices is not None and text not in meta.choices:
        raise SettingsError(f"{source}={text!r}: must be one of {', '.join(meta.choices)}")
    try:
        value = meta.parse(text) if meta.parse is not None else _convert(_type_of(settings_class, each), text)
    except ValueError as error:
        raise SettingsError(f"{source}={text!r}: must be {error}") from None
    if meta.least is not None and value is not None and value < meta.least:
        raise SettingsError(f"{source}={text!r}: must be at least {meta.least}")
    if meta.most is not None and value is not None and value > meta.most:
        raise SettingsError(f"{source}={text!r}: must be at most {meta.most}")
    return value


def _convert(kind: type, text: str) -> Any:
    if kind is bool:
        lowered = text.strip().lower()
        if lowered not in _TRUE | _FALSE:
            raise ValueError("true or false")
        return lowered in _TRUE
    if kind is int:
        try:
            return int(text)
        except ValueError:
            raise ValueError("a whole number") from None
    if kind is float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError("a number") from None
        if value != value or value in (float("inf"), float("-inf")):
            raise ValueError("a finite number")
        return value
    return text


def _type_of(settings_class: type[Settings], each: dataclasses.Field[Any]) -> type:
    hint = typing.get_type_hints(settings_class)[each.name]
    options = [option for option in typing.get_args(hint) if option is not type(None)]
    return options[0] if options else hint  # type: ignore[no-any-return]


def fields_of(settings_class: type[Settings]) -> tuple[dataclasses.Field[Any], ...]:
    """Return the settings of a program, in order."""
    return dataclasses.fields(settings_class)  # type: ignore[arg-type]  # every subclass is a dataclass


def _meta(each: dataclasses.Field[Any]) -> _Meta:
    meta: _Meta = each.metadata["octavo"]
    return meta


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
