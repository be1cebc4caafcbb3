"""OCTAVO_* variables: a misspelt or bad one stops every service at its start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from octavo.rpc.settings import (
    PREFIX,
    Settings,
    SettingsError,
    SettingsType,
    advice_on_variable,
    fields_of,
    read,
    unknown_variables,
)
from octavo.settings import ALL_SETTINGS, known_variables, wrong_client_variables
from octavo.terminal.checks.finding import Finding, Level

_SECTION = "settings"


def check_variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the variables that are set, and what is wrong with them."""
    known = known_variables()
    given = {name: value for name, value in sorted(environ.items()) if name.startswith(PREFIX)}
    for name in unknown_variables(environ, known):
        advice = advice_on_variable(name, known)
        yield Finding(_SECTION, name, Level.PROBLEM, "no Octavo program knows this variable", advice)
    wrong = dict(_wrong({name: value for name, value in given.items() if name in known}))
    wrong |= wrong_client_variables(environ)
    for name, text in wrong.items():
        yield Finding(_SECTION, name, Level.PROBLEM, text, "correct or unset it")
    fine = [name for name in given if name in known and name not in wrong]
    yield Finding(_SECTION, "variables", Level.OK, ", ".join(fine) if fine else "none set, so every default holds")


def settings_of(settings_class: type[SettingsType], environ: Mapping[str, str]) -> SettingsType:
    """Return the settings that a service would take from the variables; from none of them where one is bad."""
    known = {name: value for name, value in environ.items() if name in known_variables()}
    try:
        return read(settings_class, _required(settings_class), known, known_variables())
    except SettingsError:
        return read(settings_class, _required(settings_class), {}, frozenset())


def _wrong(given: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each bad variable and what it wants."""
    for name, value in given.items():
        for settings_class in ALL_SETTINGS:
            try:
                # One at a time: reading stops at the first that is bad.
                read(settings_class, _required(settings_class), {name: value}, known_variables())
            except SettingsError as error:
                yield name, str(error)


def _required(settings_class: type[Settings]) -> list[str]:
    return ["--model", "any"] if any(each.name == "model" for each in fields_of(settings_class)) else []
