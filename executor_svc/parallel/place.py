"""Which rank this process is, by its settings and by the variables that torchrun sets. No torch here: it is asked first
of all, so that the other ranks can start at once.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace

from executor_svc.parallel.share import Share
from octavo.rpc.settings import SettingsError
from octavo.settings import ExecutorSettings

LOOPBACK = "127.0.0.1"
_MOST_PORT = 65535


@dataclass(frozen=True)
class Place:
    """Where a rank stands, and how it finds the others."""

    share: Share
    local: Share
    """Among the ranks on its machine."""
    address: str
    """Of rank 0's machine."""
    port: int
    """Of the store, where ranks find one another."""
    has_store: bool = False
    """Whether somebody else serves the store: torchrun does."""
    attempt: str = "0"
    """Tells this start of the ranks from earlier ones over the same store."""
    listener: socket.socket | None = None
    """The store's socket, of a rank 0 that starts the others itself."""

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all ranks are on one machine."""
        return self.local.size == self.share.size

    def variables(self, rank: int) -> dict[str, str]:
        """Return what tells another rank on this machine its place, as torchrun does."""
        size = str(self.share.size)
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        return {**ranks, "MASTER_ADDR": self.address, "MASTER_PORT": str(self.port)}


def find_place(settings: ExecutorSettings, environ: Mapping[str, str]) -> Place | None:
    """Return this process's place; None where the executor is one process. Raises SettingsError.

    Without torchrun's variables it is rank 0, which is to start the others on this machine.
    """
    size = settings.tensor_parallel
    if size == 1:
        return None
    if "RANK" not in environ:
        listener = socket.create_server((LOOPBACK, 0))
        everyone = Share(0, size)
        return Place(everyone, everyone, LOOPBACK, listener.getsockname()[1], listener=listener)
    return _of_variables(size, environ)


def _of_variables(size: int, environ: Mapping[str, str]) -> Place:
    world = _number(environ, "WORLD_SIZE", 1)
    if world != size:
        raise SettingsError(
            f"--tensor-parallel {size}: {world} ranks were started (WORLD_SIZE); start as many as ranks are wanted, or "
            "unset RANK to have this process start the others"
        )
    local_size = _number(environ, "LOCAL_WORLD_SIZE", 1, size)
    address = environ.get("MASTER_ADDR", "")
    if not address:
        raise SettingsError("MASTER_ADDR: unset, though RANK is set; it is the address of rank 0's machine")
    return Place(
        Share(_number(environ, "RANK", 0, size - 1), size),
        Share(_number(environ, "LOCAL_RANK", 0, local_size - 1), local_size),
        address,
        _number(environ, "MASTER_PORT", 1, _MOST_PORT),
        has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _number(environ: Mapping[str, str], name: str, least: int, most: int | None = None) -> int:
    text = environ.get(name, "")
    if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
        bounds = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise SettingsError(f"{name}={text}: must be a number {bounds} where RANK is set, as torchrun sets both")
    return int(text)


def take_cores(settings: ExecutorSettings, place: Place) -> ExecutorSettings:
    """Return the settings with this rank's threads. Where nobody says how many, the ranks of a machine divide its
    cores, and this process keeps to its own.
    """
    if settings.threads is not None or place.local.size == 1:
        return settings
    cores = sorted(os.sched_getaffinity(0))
    first, last = place.local.of(len(cores))
    if len(cores) < place.local.size:
        return replace(settings, threads=1)
    os.sched_setaffinity(0, cores[first:last])
    return replace(settings, threads=last - first)
