"""How ranks find one another, what they refuse, and how all end when one is lost."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from paged import ragged_metadata
from ranks import connections

from executor_svc.load import Load
from executor_svc.parallel.connect import RanksError, connect
from executor_svc.parallel.connection import Connection
from executor_svc.parallel.lead import ConnectedRanks
from executor_svc.parallel.messages import Kind, decode_rows, decode_step, encode_rows, encode_step
from executor_svc.parallel.place import Place, find_place, take_cores
from executor_svc.parallel.share import Share
from executor_svc.parallel.start import flags_of
from executor_svc.parallel.watch import Watch, guarded
from octavo.rpc.settings import SettingsError, read
from octavo.settings import ExecutorSettings

FACTS = {"model": "a", "block_size": 16}
TIMEOUT = 60.0


def _settings(*flags: str) -> ExecutorSettings:
    return read(ExecutorSettings, ["--model", "any", *flags], {}, frozenset())


def _leader(size: int) -> Place:
    place = find_place(_settings("--tensor-parallel", str(size)), {})
    assert place is not None
    return place


def _other(leader: Place, rank: int) -> Place:
    place = find_place(_settings("--tensor-parallel", str(leader.share.size)), leader.variables(rank))
    assert place is not None
    assert place.share == Share(rank, leader.share.size)
    return place


def _side_by_side(*bodies: Callable[[], Any]) -> list[Any]:
    """Run bodies in threads, and return what each gave or raised."""
    results: list[Any] = [None] * len(bodies)

    def run(index: int) -> None:
        try:
            results[index] = bodies[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert not any(thread.is_alive() for thread in threads)
    return results


def test_ranks_find_one_another_and_add_up() -> None:
    """By the variables that rank 0 gives the others. Sums and minima are the same on each; rank 0 alone gathers."""
    leader = _leader(3)

    joined: list[ConnectedRanks] = []

    def body(place: Place) -> tuple[list[float], int, list[float]]:
        ranks = connect(place, FACTS, in_order=True, end=lambda: None)
        joined.append(ranks)
        x = torch.full((2,), 1.5 + place.share.rank)
        ranks.sum(x)
        least = ranks.group.least(10 - place.share.rank)
        gathered = [float(each) for each in ranks.gather(torch.tensor([float(place.share.rank)]))]
        return x.tolist(), least, gathered

    found = _side_by_side(lambda: body(leader), lambda: body(_other(leader, 2)), lambda: body(_other(leader, 1)))
    for ranks in joined:
        ranks.watch.finish()
    for ranks in joined:
        ranks.watch.close()
    assert found == [([7.5, 7.5], 8, [0.0, 1.0, 2.0]), ([7.5, 7.5], 8, []), ([7.5, 7.5], 8, [])]


def test_ranks_that_run_something_else_are_refused() -> None:
    """With what differs, on both sides."""
    leader = _leader(2)
    found = _side_by_side(
        lambda: connect(leader, FACTS, in_order=True, end=lambda: None),
        lambda: connect(_other(leader, 1), {**FACTS, "block_size": 8}, in_order=True, end=lambda: None),
    )
    assert str(found[0]) == "--tensor-parallel 2: rank 1 has block_size 8, not 16"
    assert str(found[1]) == "rank 0 refuses: rank 1 has block_size 8, not 16"


def test_a_rank_that_ended_is_not_waited_for() -> None:
    """Rank 0 says which one, and with what code."""
    with pytest.raises(RanksError, match="rank 1 ended with code 2"):
        connect(_leader(2), FACTS, in_order=True, dead=lambda: {1: 2}, end=lambda: None)


def test_strangers_are_turned_away() -> None:
    """Whoever connects without the word that the store tells, with another's, or with noise, is closed out; the ranks
    come together all the same.
    """
    leader = _leader(2)
    before = _listening_ports()
    tried: list[bytes] = []

    def stranger() -> None:
        while not (ports := _listening_ports() - before):
            time.sleep(0.01)
        for port in ports:
            for noise in (b"\xff" * 64, b"\x00" + (8).to_bytes(8, "little") + b"word 1  ", b""):
                with socket.create_connection(("127.0.0.1", port), TIMEOUT) as end:
                    end.sendall(noise)
                    # Closed out by now, it is not connected any more.
                    with contextlib.suppress(OSError):
                        end.shutdown(socket.SHUT_WR)
                    tried.append(end.recv(1))

    def join() -> ConnectedRanks:
        while len(tried) < 3:
            time.sleep(0.01)
        return connect(_other(leader, 1), FACTS, in_order=True, end=lambda: None)

    found = _side_by_side(lambda: connect(leader, FACTS, in_order=True, end=lambda: None), join, stranger)
    assert isinstance(found[0], ConnectedRanks)
    assert isinstance(found[1], ConnectedRanks)
    assert tried == [b""] * 3
    for ranks in found[:2]:
        ranks.watch.finish()
        ranks.watch.close()


def _listening_ports() -> set[int]:
    """Return the ports that this process listens at."""
    found = psutil.Process().net_connections(kind="tcp")
    return {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN}


def _watches(size: int) -> tuple[list[Watch], list[threading.Event]]:
    ours, theirs = connections(size)
    ended = [threading.Event() for _ in range(size)]
    peers = [ours, *({0: end} for end in theirs)]
    watches = [Watch(each, end.set) for each, end in zip(peers, ended, strict=True)]
    for watch in watches:
        watch.start()
    return watches, ended


@pytest.mark.parametrize("lost", [0, 2])
def test_the_loss_of_a_rank_ends_all(lost: int, caplog: pytest.LogCaptureFixture) -> None:
    """The kernel tells of the end of a process by its connection; whoever hears it tells the others why."""
    watches, ended = _watches(4)
    # A process that has ended hears nothing and tells nothing.
    watches[lost]._is_over = True
    for connection in watches[lost]._peers.values():
        connection._socket.shutdown(socket.SHUT_RDWR)
    for rank, event in enumerate(ended):
        assert rank == lost or event.wait(TIMEOUT)
    reasons = [record.fields["reason"] for record in caplog.records if record.levelname == "CRITICAL"]  # type: ignore[attr-defined]
    assert len(reasons) == 3
    assert all(reason.startswith(f"rank {lost} is gone") for reason in reasons)
    for watch in watches:
        watch.close()


def test_an_error_on_one_rank_ends_all() -> None:
    """The others wait for what it will not do. Its words are the reason."""
    watches, ended = _watches(3)
    with pytest.raises(ValueError, match="out of order"), guarded(watches[1], 1):
        raise ValueError("out of order")
    assert all(event.wait(TIMEOUT) for event in ended)
    for watch in watches:
        watch.close()


def test_an_end_in_order_is_no_loss() -> None:
    """Rank 0 says that it ends; the others hear so, and nobody's process is ended for it."""
    watches, ended = _watches(3)
    watches[0].finish()
    assert [watch.received.get(timeout=TIMEOUT)[0] for watch in watches[1:]] == [Kind.END] * 2
    for watch in watches:
        watch.close()
    assert not any(event.is_set() for event in ended)


def test_a_rank_that_cannot_start_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """The others end with its reason; it goes on to its own end."""
    watches, ended = _watches(2)
    watches[1].leave("rank 1 could not start: no memory")
    assert ended[0].wait(TIMEOUT)
    assert not ended[1].is_set()
    assert "rank 1 could not start: no memory" in [getattr(each, "fields", {}).get("reason") for each in caplog.records]
    watches[0].close()


@pytest.mark.parametrize("failure", [None, "the device of rank 0 has failed"])
def test_a_rank_0_whose_device_has_failed_ends_the_others(
    failure: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """At once, for they may wait in what it will not do; told to stop, it ends them in order."""
    watches, ended = _watches(2)
    nothing: Any = None
    load = Load(_settings(), nothing, torch.float32, torch.device("cpu"), nothing, (), nothing)
    load._ranks = ConnectedRanks(nothing, watches[0])
    load.stop(failure)
    if failure is None:
        assert watches[1].received.get(timeout=TIMEOUT)[0] is Kind.END
    else:
        assert ended[1].wait(TIMEOUT)
    reasons = [getattr(record, "fields", {}).get("reason") for record in caplog.records]
    assert reasons == ([] if failure is None else [failure])
    assert not ended[0].is_set()
    for watch in watches:
        watch.close()


@pytest.mark.parametrize("has_host", [True, False])
def test_a_step_comes_as_it_went(has_host: bool) -> None:
    """Every tensor of a step's inputs, and what the host knows of it."""
    step = ragged_metadata([([4, 2, 9], 20, 3), ([7], 0, 5), ([1, 3], 15, 1)], 8)
    step = step if has_host else replace(step, context_lens_host=None)
    tokens = torch.arange(9) * 1000
    found_tokens, found = decode_step(bytearray(encode_step(tokens, step)))
    assert torch.equal(found_tokens, tokens)
    for name in ("positions", "slot_mapping", "query_start", "context_lens", "block_tables"):
        one, other = getattr(found, name), getattr(step, name)
        assert one.dtype == other.dtype
        assert torch.equal(one, other), name
    assert (found.query_lens, found.context_lens_host) == (step.query_lens, step.context_lens_host)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_come_as_they_went(dtype: torch.dtype) -> None:
    """Bit for bit, also those of a view."""
    x = torch.randn(5, 12).to(dtype)[::2, 3:9]
    assert torch.equal(decode_rows(bytearray(encode_rows(x))), x)


def test_messages_arrive_whole_and_in_order() -> None:
    """Large ones too, which come in pieces."""
    ours, (theirs,) = connections(2)
    sent = [b"", b"a", os.urandom(3_000_000), b"b"]
    sender = threading.Thread(target=lambda: [ours[1].send(Kind.STEP, each) for each in sent])
    sender.start()
    assert [bytes(theirs.receive()[1]) for _ in sent] == sent
    sender.join()
    ours[1].close()
    with pytest.raises(EOFError):
        theirs.receive()
    theirs.close()


def test_one_process_has_no_place() -> None:
    """Whatever variables are set: they may be another's."""
    assert find_place(_settings(), {"RANK": "1", "WORLD_SIZE": "2"}) is None


def test_torchrun_s_variables_are_the_place() -> None:
    """A rank of four on two machines; the store is torchrun's."""
    variables = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    variables |= {"MASTER_ADDR": "first", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    place = find_place(_settings("--tensor-parallel", "4"), variables | {"TORCHELASTIC_RESTART_COUNT": "2"})
    assert place == Place(Share(3, 4), Share(1, 2), "first", 29500, has_store=True, attempt="2")
    assert not place.is_on_one_machine


@pytest.mark.parametrize(
    ("flags", "variables", "message"),
    [
        ([], {"RANK": "0", "WORLD_SIZE": "2"}, r"--tensor-parallel 4: 2 ranks were started \(WORLD_SIZE\)"),
        ([], {"RANK": "0"}, "WORLD_SIZE=: must be a number of at least 1"),
        ([], {"RANK": "4", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a"}, "RANK=4: .* from 0 to 3"),
        ([], {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, "MASTER_ADDR: unset"),
    ],
)
def test_places_that_cannot_be_are_refused(flags: list[str], variables: dict[str, str], message: str) -> None:
    """With the flag or variable that is wrong."""
    with pytest.raises(SettingsError, match=message):
        find_place(_settings("--tensor-parallel", "4", *flags), variables)


def test_ranks_divide_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each keeps to its own, unless the number of threads is given; where cores are too few, to one thread."""
    bound: list[Any] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 7, 8})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: bound.append(cores))
    place = Place(Share(5, 6), Share(1, 2), "a", 1)
    assert take_cores(_settings(), place).threads == 3
    assert bound == [[5, 7, 8]]
    assert take_cores(_settings("--threads", "9"), place).threads == 9
    assert take_cores(_settings(), replace(place, local=Share(5, 6))).threads == 1
    assert len(bound) == 1


def test_other_ranks_get_the_same_settings() -> None:
    """Whatever was said by flags or variables, they read it again."""
    flags = ["--tensor-parallel", "2", "--kv-memory", "3MiB", "--deterministic", "--passes=-views,-in_place"]
    settings = _settings(*flags, "--log-level", "warning")
    assert read(ExecutorSettings, flags_of(settings), {}, frozenset()) == settings


def test_shares_are_even() -> None:
    """They cover everything, in order, and none is more than one larger than another."""
    for size in range(1, 9):
        for count in range(40):
            ranges = [share.of(count) for share in Share(0, size).of_all()]
            assert [begin for begin, _ in ranges[1:]] == [end for _, end in ranges[:-1]]
            widths = np.diff(ranges).ravel()
            assert (ranges[0][0], ranges[-1][1]) == (0, count)
            assert widths.max() - widths.min() <= 1
            assert widths.max() == Share(0, size).widest(count)


def test_connections_ask_after_a_silent_machine() -> None:
    """A machine that is gone closes nothing: the kernel is told to ask after it."""
    ours, (theirs,) = connections(2)
    for connection in (ours[1], theirs):
        assert isinstance(connection, Connection)
        assert connection._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connection._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1
        connection.close()
