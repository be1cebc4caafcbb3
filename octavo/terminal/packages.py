"""Which packages Octavo's parts want, by the metadata of the installed distribution."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata

_REQUIREMENT = re.compile(r"([A-Za-z0-9][\w.-]*)[^;]*(?:;.*extra == ['\"](\w+)['\"])?")
_EVERYTHING = "executor"
"""The extra to name where several have a package: preparing and running models need all of it."""


@dataclass(frozen=True)
class Requirement:
    """A package, and the extra that wants it; extra "" is Octavo itself."""

    package: str
    extra: str


def requirements() -> tuple[Requirement, ...]:
    """Return what the installed Octavo declares. Raises PackageNotFoundError where it runs without being installed."""
    found = []
    for line in metadata.requires("octavo") or ():
        match = _REQUIREMENT.fullmatch(line.strip())
        if match is not None:
            found.append(Requirement(match[1], match[2] or ""))
    return tuple(found)


def requirement_for(module: str) -> str:
    """Return the command that installs the package of a module that is missing."""
    package = module.partition(".")[0].replace("_", "-").lower()
    try:
        extras = {each.extra for each in requirements() if each.package.lower() == package}
    except metadata.PackageNotFoundError:
        extras = set()
    extra = _EVERYTHING if _EVERYTHING in extras or not extras - {""} else min(extras - {""})
    return f'pip install "octavo[{extra}]"'


def version_of(package: str) -> str | None:
    """Return the installed version of a package; None where it is not installed. Imports nothing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
