"""Logs are one JSON object a line, with the request they belong to."""

from __future__ import annotations

import json
import logging
import sys

from octavo.rpc.logprobs import pack_floats, pack_ids, unpack_floats, unpack_ids
from octavo.rpc.telemetry import JsonFormatter, bind_request


def _line(**extra: object) -> dict[str, object]:
    record = logging.LogRecord("gateway.servicer", logging.INFO, __file__, 1, "finished %d", (3,), None)
    record.__dict__.update(extra)
    line: dict[str, object] = json.loads(JsonFormatter("gateway").format(record))
    return line


def test_line_has_service_message_and_fields() -> None:
    """Fields of the call stand beside the fixed ones."""
    line = _line(fields={"tokens": 7})
    assert (line["service"], line["level"], line["message"], line["tokens"]) == ("gateway", "info", "finished 3", 7)
    assert str(line["time"]).endswith("+00:00")


def test_request_id_is_bound_for_the_block_only() -> None:
    """Lines written within bind_request carry its id, those after do not."""
    with bind_request("abc-1"):
        assert _line()["request_id"] == "abc-1"
    assert "request_id" not in _line()


def test_an_exception_stays_on_one_line() -> None:
    """A traceback is part of the object: a log line is always one line."""
    try:
        raise ValueError("boom")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, __file__, 1, "failed", (), sys.exc_info())
    text = JsonFormatter("gateway").format(record)
    assert "\n" not in text
    assert "ValueError: boom" in json.loads(text)["exception"]


def test_logprob_arrays_round_trip_little_endian() -> None:
    """Packed arrays are little-endian, whatever the machine."""
    assert pack_ids([1, 2**32 - 1]) == b"\x01\x00\x00\x00\xff\xff\xff\xff"
    assert unpack_ids(pack_ids([5, 6])) == (5, 6)
    assert pack_floats([1.0]) == b"\x00\x00\x80\x3f"
    assert unpack_floats(pack_floats([-0.5, 2.0])) == (-0.5, 2.0)
