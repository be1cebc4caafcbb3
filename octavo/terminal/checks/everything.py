"""All checks, in the order in which a person wants to know."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from octavo.terminal.checks.finding import Finding
from octavo.terminal.checks.machine import check_machine
from octavo.terminal.checks.models import check_models
from octavo.terminal.checks.ports import check_ports, check_services, ports_of, services_of
from octavo.terminal.checks.software import check_software
from octavo.terminal.checks.variables import check_variables


def check_everything(home: Path, environ: Mapping[str, str]) -> list[Finding]:
    """Run every check and return what was found. Takes seconds: ports and services are asked."""
    return [
        *check_machine(home),
        *check_software(),
        *check_models(home, environ),
        *check_variables(environ),
        *asyncio.run(_network(environ)),
    ]


async def _network(environ: Mapping[str, str]) -> list[Finding]:
    ports, services = await asyncio.gather(check_ports(ports_of(environ)), check_services(services_of(environ)))
    return [*ports, *services]
