"""Compose and its engine, as far as this machine has them. Nothing here knows which version of compose it runs."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BASE_IMAGE = "python:3.11-slim-bookworm"
_QUICK = 60.0
"""Seconds for a question to the engine."""
_SLOW = 900.0
"""Seconds for a build or a start."""


class CommandFailed(Exception):  # noqa: N818 - it reads as what happened
    """A command ended with an error; the message holds its last words."""


def run(command: Sequence[str], *, environ: Mapping[str, str] | None = None, timeout: float = _QUICK) -> str:
    """Run a command in the project's root and return what it printed. Raises CommandFailed."""
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
    )
    if done.returncode != 0:
        raise CommandFailed(
            f"{' '.join(command)} exited with {done.returncode}:\n{(done.stdout + done.stderr)[-6000:]}"
        )
    return done.stdout


def docker(*arguments: str) -> str:
    """Ask the engine. Raises CommandFailed."""
    return run(["docker", *arguments])


@functools.cache
def installed_composes() -> Mapping[str, tuple[str, ...]]:
    """Return the command of each compose that is here, by "v1" and "v2" (which counts all later ones)."""
    found: dict[str, tuple[str, ...]] = {}
    for command in (
        ("docker", "compose"),
        (str(Path(sys.executable).parent / "docker-compose"),),
        ("docker-compose",),
    ):
        if shutil.which(command[0]) is None:
            continue
        try:
            version = run([*command, "version", "--short"]).strip().removeprefix("v")
        except (CommandFailed, subprocess.TimeoutExpired):
            continue
        found.setdefault("v1" if version.startswith("1.") else "v2", command)
    return found


@functools.cache
def why_no_engine() -> str | None:
    """Return what is missing for running containers here; None where nothing is."""
    if shutil.which("docker") is None:
        return "no docker client"
    try:
        docker("version", "--format", "{{.Server.Version}}")
    except (CommandFailed, subprocess.TimeoutExpired) as error:
        return f"no container engine answers: {str(error).strip().splitlines()[-1]}"
    try:
        docker("image", "inspect", BASE_IMAGE)
    except CommandFailed:
        try:
            run(["docker", "pull", "--quiet", BASE_IMAGE], timeout=_SLOW)
        except (CommandFailed, subprocess.TimeoutExpired) as error:
            return f"the engine has no {BASE_IMAGE} and cannot pull it: {str(error).strip().splitlines()[-1]}"
    return None


@dataclass(frozen=True)
class Project:
    """The stack of docker-compose.yml under a name of its own. `variables` are what .env would say."""

    command: tuple[str, ...]
    name: str
    files: tuple[str, ...] = ("docker-compose.yml",)
    variables: Mapping[str, str] = field(default_factory=dict)

    def compose(self, *arguments: str, timeout: float = _SLOW) -> str:
        """Run a compose command and return what it printed. Raises CommandFailed."""
        files = [text for each in self.files for text in ("-f", each)]
        # The developer's own settings stay out, be they exported or in .env.
        own = {name: value for name, value in os.environ.items() if not name.startswith(("OCTAVO_", "COMPOSE_"))}
        return run(
            [*self.command, "--project-name", self.name, "--env-file", "tests/compose/empty.env", *files, *arguments],
            environ={**own, **self.variables},
            timeout=timeout,
        )

    def containers(self, service: str | None = None) -> list[dict[str, Any]]:
        """Inspect the containers of a service, running or not; of all services where none is named."""
        ids = self.compose("ps", "-a", "-q", *([service] if service else [])).split()
        return json.loads(docker("inspect", *ids)) if ids else []

    def published(self, service: str, port: int, index: int = 1) -> str:
        """Return where a port of a service's container number `index` is published, host:port."""
        return self.compose("port", "--index", str(index), service, str(port)).strip()

    def logs(self) -> str:
        """Return what the services have logged."""
        return self.compose("logs", "--no-color")


def address_in_network(container: Mapping[str, Any]) -> str:
    """Return the container's IP address in the project's network."""
    (network,) = container["NetworkSettings"]["Networks"].values()
    return str(network["IPAddress"])


def other_processes(container: Mapping[str, Any], program: str) -> list[int]:
    """Return the ids, outside, of a container's processes of a program, but the first: no check of its health."""
    listed = [line.split(maxsplit=1) for line in docker("top", container["Id"], "-eo", "pid,args").splitlines()[1:]]
    found = [int(pid) for pid, command in listed if program in command]
    return [pid for pid in found if pid != container["State"]["Pid"]]


def crash(container: Mapping[str, Any], image: str, pid: int | None = None) -> None:
    """Kill a container's first process, or that of this id, with SIGKILL from outside.

    `docker kill` would not do: the engine takes it for a wish, and restarts nothing.
    """
    program = f"import os; os.kill({pid or container['State']['Pid']}, 9)"
    docker("run", "--rm", "--pid", "host", "--user", "0", "--entrypoint", "python", image, "-c", program)
