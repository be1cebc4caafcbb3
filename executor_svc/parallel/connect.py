"""How the ranks come together: they find rank 0 by a store, tell it what they run, and are told whether it fits."""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from executor_svc.parallel.carrier import DeviceCarrier
from executor_svc.parallel.connection import Connection
from executor_svc.parallel.group import Group
from executor_svc.parallel.lead import ConnectedRanks
from executor_svc.parallel.messages import Kind
from executor_svc.parallel.nccl import open_nccl
from executor_svc.parallel.place import LOOPBACK, Place
from executor_svc.parallel.watch import Watch, end_process
from octavo.rpc.settings import SettingsError

logger = logging.getLogger(__name__)

PATIENCE = 600.0
"""Seconds for all ranks to come."""
_LOOK = 0.2
"""Seconds between two looks at whether the processes that are waited for still live."""
_HELLO_PATIENCE = 5.0
"""Seconds in which whoever connects must say who it is."""
_KEY = "leader"
_INTERFACE = "GLOO_SOCKET_IFNAME"
_CPU = torch.device("cpu")

Facts = Mapping[str, object]
"""What a rank runs. All ranks must run the same."""


class RanksError(SettingsError):
    """The ranks do not come together."""


def connect(
    place: Place,
    facts: Facts,
    *,
    in_order: bool,
    device: torch.device = _CPU,
    dead: Callable[[], Mapping[int, int]] = dict,
    end: Callable[[], None] = end_process,
) -> ConnectedRanks:
    """Connect this rank to the others; returns once all have come. From then on the loss of one ends all, by `end`.

    `device`: this rank's own, where its part of the model is. `dead`: exit codes of ranks that have ended already,
    where rank 0 can know. Raises RanksError.
    """
    if device.type != "cpu" and not dist.is_nccl_available():
        raise RanksError(
            f"--tensor-parallel {place.share.size}: torch {torch.__version__} is built without NCCL, by which ranks on "
            "GPUs add up; install one that has it, as constraints-gpu.txt has it"
        )
    if place.is_on_one_machine and os.path.isdir("/sys/class/net/lo"):  # noqa: PTH112 - one stat
        os.environ.setdefault(_INTERFACE, "lo")
    try:
        store = _store(place)
        if place.share.rank == 0:
            peers = _gather_peers(place, store, facts, dead)
        else:
            peers = {0: _join(place, store, facts)}
    except (OSError, EOFError, RuntimeError) as error:
        raise RanksError(
            f"--tensor-parallel {place.share.size}: rank {place.share.rank} does not find the others by "
            f"{place.address}:{place.port}: {error}"
        ) from None
    watch = Watch(peers, end)
    watch.start()
    if device.type == "cpu":
        return ConnectedRanks(Group(store, place.share, in_order=in_order), watch)
    collectives = open_nccl(PrefixStore("device", store), place.share)
    group = Group(store, place.share, in_order=in_order, collectives=collectives)
    return ConnectedRanks(group, watch, DeviceCarrier(watch, group, device))


def _store(place: Place) -> Store:
    is_master = place.share.rank == 0 and not place.has_store
    descriptor = None if place.listener is None else place.listener.detach()
    store = TCPStore(
        place.address,
        place.port,
        place.share.size,
        is_master=is_master,
        timeout=timedelta(seconds=PATIENCE),
        wait_for_workers=False,
        master_listen_fd=descriptor,
    )
    return PrefixStore(f"octavo/{place.attempt}", store)


def _gather_peers(
    place: Place, store: Store, facts: Facts, dead: Callable[[], Mapping[int, int]]
) -> dict[int, Connection]:
    """Let the other ranks join, those that know the word that only the store tells, and run the same."""
    peers: dict[int, Connection] = {}
    try:
        _wait_for(peers, place, store, dead)
        told = {rank: json.loads(connection.receive()[1]) for rank, connection in peers.items()}
        reasons = "; ".join(filter(None, (_difference(rank, facts, each) for rank, each in told.items())))
        if reasons:
            for connection in peers.values():
                connection.say_last(Kind.LOST, reasons.encode())
            raise RanksError(f"--tensor-parallel {place.share.size}: {reasons}")
        for connection in peers.values():
            connection.send(Kind.WELCOME)
    except BaseException:
        for connection in peers.values():
            connection.close()
        raise
    return peers


def _wait_for(peers: dict[int, Connection], place: Place, store: Store, dead: Callable[[], Mapping[int, int]]) -> None:
    """Take the other ranks in, by rank, until all are there."""
    word = secrets.token_hex(16)
    deadline = time.monotonic() + PATIENCE
    with _listening(place.address) as listener:
        store.set(_KEY, f"{listener.getsockname()[1]} {word}")
        listener.settimeout(_LOOK)
        while len(peers) < place.share.size - 1:
            missing = [rank for rank in range(1, place.share.size) if rank not in peers]
            for rank, code in dead().items():
                raise RanksError(f"rank {rank} ended with code {code} before all had come; its log says why")
            if time.monotonic() > deadline:
                raise RanksError(f"ranks {missing} did not come within {PATIENCE:.0f} seconds")
            with contextlib.suppress(TimeoutError):
                end, _ = listener.accept()
                _admit(Connection(end), word, peers, missing)


def _admit(connection: Connection, word: str, peers: dict[int, Connection], missing: list[int]) -> None:
    """Take a connection in, whose first message is the word and a rank that is missing; close any other."""
    connection.set_timeout(_HELLO_PATIENCE)
    with contextlib.suppress(OSError, EOFError, ValueError):
        kind, message = connection.receive(limit=64)
        told, _, rank = message.decode().partition(" ")
        if kind is Kind.HELLO and hmac.compare_digest(told, word) and int(rank) in missing:
            peers[int(rank)] = connection
            connection.set_timeout(None)
            return
    connection.close()


def _join(place: Place, store: Store, facts: Facts) -> Connection:
    port, _, word = store.get(_KEY).decode().partition(" ")
    connection = Connection(socket.create_connection((place.address, int(port)), PATIENCE))
    try:
        connection.send(Kind.HELLO, f"{word} {place.share.rank}".encode())
        connection.send(Kind.HELLO, json.dumps(facts).encode())
        kind, message = connection.receive()
        if kind is not Kind.WELCOME:
            raise RanksError(f"rank 0 refuses: {message.decode()}")
    except BaseException:
        connection.close()
        raise
    return connection


def _difference(rank: int, ours: Facts, theirs: Facts) -> str:
    """Return what another rank runs otherwise than rank 0; empty where all is the same."""
    wrong = [name for name, value in ours.items() if theirs.get(name) != value]
    differing = [f"{name} {theirs.get(name)!r}, not {ours[name]!r}" for name in wrong]
    return f"rank {rank} has {', '.join(differing)}" if differing else ""


@contextlib.contextmanager
def _listening(address: str) -> Iterator[socket.socket]:
    """Listen at the address by which the others find this machine, and at no other."""
    family, *_, where = socket.getaddrinfo(address or LOOPBACK, 0, type=socket.SOCK_STREAM)[0]
    try:
        listener = socket.create_server((where[0], 0), family=family)
    except OSError as error:
        raise RanksError(f"MASTER_ADDR={address}: must be an address of the machine of rank 0 ({error})") from None
    with listener:
        yield listener
