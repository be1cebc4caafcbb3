"""`octavo requests`, `octavo cancel` and `octavo load` against a scripted operator's API."""

from __future__ import annotations

import json

import pytest
from fake_gateway import FakeGateway
from google.protobuf.duration_pb2 import Duration

from octavo.cli import main
from octavo.v1 import admin_pb2


def request(request_id: str, **fields: object) -> admin_pb2.RequestInfo:
    """A live request."""
    values = {"model": "m", "state": admin_pb2.REQUEST_STATE_RUNNING, "age": Duration(seconds=65)}
    return admin_pb2.RequestInfo(request_id=request_id, **values | fields)  # type: ignore[arg-type]


def test_requests_are_a_table_in_the_order_of_the_api(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """Every column that tells what a request is and holds; numbers to the right; nothing is a word."""
    gateway.live = [
        request(
            "aa-1",
            prompt_tokens=7,
            completion_tokens=120,
            cached_tokens=4,
            kv_blocks=8,
            executors=["h:1", "h:2"],
            label="nightly",
            tenant="acme",
        ),
        request(
            "aa-2",
            state=admin_pb2.REQUEST_STATE_WAITING,
            wait_reason=admin_pb2.WAIT_REASON_NO_FREE_BLOCKS,
            remaining_deadline=Duration(seconds=3),
        ),
    ]
    assert main(["requests", "--address", gateway.admin_address]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "id    state    why it waits    model  tenant  prompt  output  cached  blocks    age  left  executors  label",
        "aa-1  running  -               m      acme         7     120       4       8  1m05s     -  h:1,h:2    nightly",
        "aa-2  waiting  no free blocks  m      -            0       0       0       0  1m05s  3.0s  -          -",
    ]
    gateway.live = []
    assert main(["requests", "--address", gateway.admin_address]) == 0
    assert capsys.readouterr().out == "no live requests\n"


def test_the_table_is_no_wider_than_what_it_tells(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """A column that is empty for every request is left out, and of a long id the end is shown; where two have one end,
    both are whole.
    """
    cell, other = "0123456789abcdef" * 2, "fedcba9876543210" + "0123456789abcdef"
    gateway.live = [request(f"{cell}-1", executors=["h:1"]), request(f"{cell}-2")]
    assert main(["requests", "--address", gateway.admin_address]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "id      state    model  prompt  output  cached  blocks    age  executors",
        "cdef-1  running  m           0       0       0       0  1m05s  h:1",
        "cdef-2  running  m           0       0       0       0  1m05s  -",
    ]
    gateway.live = [request(f"{cell}-1"), request(f"{other}-1")]
    assert main(["requests", "--address", gateway.admin_address]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == [f"{cell}-1", f"{other}-1"]


def test_what_clients_name_their_requests_cannot_break_the_table(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    """Labels are the clients' own words: a line end or an escape sequence in one stays in its cell."""
    gateway.live = [request("a-1", label="x\ny\x1b[31m")]
    assert main(["requests", "--address", gateway.admin_address]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[1].endswith("x y\ufffd[31m")


def test_requests_as_json_have_every_field(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """What programs read is a list of objects, times in seconds."""
    gateway.live = [request("a-1", prompt_tokens=7, executors=["h:1"])]
    assert main(["requests", "--json", "--address", gateway.admin_address]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found == {
        "request_id": "a-1",
        "label": "",
        "model": "m",
        "tenant": "",
        "state": "running",
        "prompt_tokens": 7,
        "completion_tokens": 0,
        "live_choices": 0,
        "kv_blocks": 0,
        "executors": ["h:1"],
        "age": 65.0,
        "remaining_deadline": None,
        "wait_reason": None,
        "cached_tokens": 0,
        "priority": 0,
        "preemptions": 0,
    }


def test_watching_lists_again_until_ctrl_c(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each round asks anew, a list a line with --json; Ctrl-C ends it with 130."""
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        gateway.live = [request("a-1")]
        if len(pauses) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", sleep)
    assert main(["requests", "--watch", "0.5", "--json", "--address", gateway.admin_address]) == 130
    rounds = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(listed) for listed in rounds] == [0, 1]
    assert pauses == [0.5, 0.5]


@pytest.mark.parametrize("text", ["0", "often", "nan", "-1"])
def test_watching_wants_a_sensible_pause(text: str) -> None:
    """No hammering of the scheduler by a slip."""
    with pytest.raises(SystemExit) as ended:
        main(["requests", "--watch", text])
    assert ended.value.code == 2


def test_cancel_takes_whole_ids_and_unique_beginnings(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """A whole id wins over longer ones that begin with it; each request is cancelled once."""
    gateway.live = [request("aa-1"), request("aa-12"), request("bb-1")]
    assert main(["cancel", "aa-1", "b", "bb-1", "--address", gateway.admin_address]) == 0
    assert gateway.cancelled_ids == ["aa-1", "bb-1"]
    assert capsys.readouterr().out == "cancelled aa-1\ncancelled bb-1\n"


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ("aa", "'aa' stands for 2 ids", "aa-1, aa-12"),
        ("1", "'1' stands for 2 ids", "aa-1, bb-1"),
        ("2", "no live request has the id '2'", "octavo requests"),
        ("zz", "no live request has the id 'zz'", "octavo requests"),
        ("", "no live request has the id ''", "octavo requests"),
    ],
)
def test_cancel_does_nothing_where_an_id_is_not_clear(
    gateway: FakeGateway, given: str, message: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One bad id among good ones cancels none: the person looks again first."""
    gateway.live = [request("aa-1"), request("aa-12"), request("bb-1")]
    assert main(["cancel", "bb-1", given, "--address", gateway.admin_address]) == 1
    assert gateway.cancelled_ids == []
    err = capsys.readouterr().err
    assert f"octavo: error: {message}\nhint: " in err
    assert hint in err


def test_cancel_takes_the_number_or_the_end_of_an_id(gateway: FakeGateway) -> None:
    """Ids of a cell are alike but for the number behind the dash: it is what people type."""
    cell = "0123456789abcdef" * 2
    gateway.live = [request(f"{cell}-2"), request(f"{cell}-12"), request("ff-7")]
    assert main(["cancel", "2", "ef-12", "f-7", "--address", gateway.admin_address]) == 0
    assert gateway.cancelled_ids == [f"{cell}-2", f"{cell}-12", "ff-7"]


def test_cancel_says_what_ended_by_itself(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """Between the list and the cancel a request may end: told apart, and the exit code is 1."""
    gateway.live, gateway.gone = [request("a-1"), request("b-1")], {"a-1"}
    assert main(["cancel", "a-1", "b-1", "--address", gateway.admin_address]) == 1
    assert capsys.readouterr() == ("cancelled b-1\n", "a-1 has ended by itself\n")
    assert main(["cancel", "a-1", "b-1", "--json", "--address", gateway.admin_address]) == 1
    assert json.loads(capsys.readouterr().out) == {"cancelled": ["b-1"], "ended": ["a-1"]}


def test_load_shows_the_cell_and_each_executor(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """Who runs what, and who holds the blocks."""
    executor = admin_pb2.ExecutorInfo(
        address="h:1",
        model="m",
        running_sequences=3,
        waiting_sequences=1,
        steps_in_flight=2,
        steps=40,
        total_blocks=200,
        free_blocks=150,
        owned_blocks=30,
        cached_blocks=20,
    )
    gateway.load = admin_pb2.GetLoadResponse(
        term=9,
        live_requests=4,
        waiting_sequences=1,
        running_sequences=3,
        preemptions=5,
        gateways=2,
        executors=[executor],
    )
    assert main(["load", "--address", gateway.admin_address]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "4 live requests; sequences: 3 running, 1 waiting; 5 preemptions so far; 2 gateways",
        "",
        "executor  model  running  waiting  in flight  steps  owned  cached  free  total  usage",
        "h:1       m            3        1          2     40     30      20   150    200    15%",
    ]
    assert main(["load", "--json", "--address", gateway.admin_address]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["term"], told["executors"][0]["free_blocks"]) == (9, 150)
    gateway.load = admin_pb2.GetLoadResponse()
    assert main(["load", "--address", gateway.admin_address]) == 0
    assert capsys.readouterr().out.endswith("no executor is ready\n")


def test_the_admin_port_is_found_by_its_variable(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """OCTAVO_ADMIN_ADDRESS stands for --address."""
    monkeypatch.setenv("OCTAVO_ADMIN_ADDRESS", gateway.admin_address)
    assert main(["requests"]) == 0
    assert capsys.readouterr().out == "no live requests\n"


def test_a_gateways_client_port_is_told_from_its_admin_port(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    """The usual mix-up of the two addresses is named as such."""
    assert main(["load", "--address", gateway.address]) == 1
    assert "hint: check --address: a gateway has one port for clients and one for operators" in capsys.readouterr().err
