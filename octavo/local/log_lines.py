"""The end of a service's log, for people."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

_KNOWN = ("time", "level", "service", "logger", "message", "exception")


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a log file, JSON records as plain text; [] where there is none."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            records = deque(file, maxlen=count)
    except OSError:
        return []
    lines = [line for record in records for line in readable(record.rstrip("\n")).splitlines()]
    return lines[-count:]


def readable(record: str) -> str:
    """Return one log record as text: time, level, message, fields, then the exception; anything else as it is."""
    try:
        fields = json.loads(record)
    except ValueError:
        return record
    if not isinstance(fields, dict) or "message" not in fields:
        return record
    time = str(fields.get("time", ""))[11:23]
    extra = " ".join(f"{key}={value}" for key, value in fields.items() if key not in _KNOWN)
    text = " ".join(part for part in (time, fields.get("level", ""), str(fields["message"]), extra) if part)
    return f"{text}\n{fields['exception']}" if fields.get("exception") else text
