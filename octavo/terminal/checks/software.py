"""Python, compiler, packages, containers: what is installed, asked without importing any of it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata

from octavo.terminal.checks.finding import Finding, Level
from octavo.terminal.packages import requirements, version_of

_SECTION = "software"
_COMMAND_TIMEOUT = 10.0
_EXTRAS = {
    "": ("octavo", Level.PROBLEM, "nothing of Octavo runs without them"),
    "gateway": ("gateway", Level.PROBLEM, "a gateway needs them"),
    "executor": ("executor", Level.PROBLEM, "preparing and running models needs them"),
    "bench": ("bench", Level.NOTE, "only `octavo bench` needs them"),
}
"""By extra: what to call it, how bad it is when it lacks something, and why."""
_TOLD = ("grpcio", "protobuf", "tokenizers", "torch", "transformers", "httpx", "matplotlib")
"""Packages whose version is worth a look."""


def check_software() -> Iterator[Finding]:
    """Yield what is installed."""
    yield Finding(_SECTION, "python", Level.OK, f"{platform.python_version()} at {sys.executable}")
    yield _compiler()
    yield from _packages()
    yield _compose()


def _compiler() -> Finding:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else ("g++", "clang++", "c++"):
        first = _first_line((name, "--version"))
        if first is not None:
            return Finding(_SECTION, "compiler", Level.OK, f"{name}: {first}")
    advice = "Debian: apt install g++; where the executor runs elsewhere none is needed"
    text = f"CXX={wanted} is not a program" if wanted else "no C++ compiler found"
    return Finding(_SECTION, "compiler", Level.NOTE, f"{text}: the executor compiles its kernels with one", advice)


def _packages() -> Iterator[Finding]:
    try:
        wanted = requirements()
    except metadata.PackageNotFoundError:
        advice = 'install it: pip install "octavo[gateway,executor]"'
        yield Finding(_SECTION, "octavo", Level.PROBLEM, "runs from a folder without being installed", advice)
        return
    for extra, (subject, level, why) in _EXTRAS.items():
        versions = {each.package: version_of(each.package) for each in wanted if each.extra == extra}
        missing = [package for package, version in versions.items() if version is None]
        if missing:
            advice = f'pip install "octavo[{extra}]"' if extra else "pip install octavo"
            verb = "is" if len(missing) == 1 else "are"
            text = f"{', '.join(missing)} {verb} not installed; {why}"
            yield Finding(_SECTION, subject, level, text, advice)
        elif versions:
            told = [f"{name} {version}" for name, version in versions.items() if name in _TOLD]
            own = [f"octavo {version_of('octavo')}"] if not extra else []
            yield Finding(_SECTION, subject, Level.OK, ", ".join([*own, *told]))


def _compose() -> Finding:
    for command in (("docker", "compose"), ("docker-compose",)):
        first = _first_line((*command, "version", "--short"))
        if first is None:
            continue
        name = f"{' '.join(command)} {first}"
        # A question that only the engine can answer; no version of compose takes it without a file.
        asked = (*command, "--project-name", "octavo-doctor", "--file", "-", "ps", "--quiet")
        if _output(asked, stdin="services: {none: {image: none}}") is not None:
            return Finding(_SECTION, "compose", Level.OK, f"{name}, whose engine answers")
        text = f"{name}, but no container engine answers"
        advice = "start it (Debian: systemctl start docker), where `docker compose up` is wanted"
        return Finding(_SECTION, "compose", Level.NOTE, text, advice)
    advice = "only for `docker compose up`; `octavo up` needs no container"
    return Finding(_SECTION, "compose", Level.NOTE, "docker compose is not installed", advice)


def _first_line(command: Sequence[str]) -> str | None:
    """Return the first line that a command prints; None where there is none, or it is missing, fails or hangs."""
    lines = (_output(command) or "").strip().splitlines()
    return lines[0].strip() if lines else None


def _output(command: Sequence[str], stdin: str = "") -> str | None:
    """Return what a command prints; None where it is missing, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
