"""docs/clients.md names every reason that a client can be given with an error, under its code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from pages import ROOT

PAGE = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
SOURCES = ("gateway", "scheduler_svc", "octavo/rpc", "octavo/client")
_REASON = re.compile(r"[A-Z]+(_[A-Z]+)*")
_ROW = re.compile(r"^\| ([A-Z_]+) \| (`[^|]+`) \|", re.MULTILINE)

ANY_INTERNAL = {
    "BAD_INPUT",
    "DESYNCHRONIZED",
    "INTERNAL",
    "NAN_LOGITS",
    "OUTPUT_FAULT",
    "POISON",
    "SAMPLED_TOKEN_OUT_OF_RANGE",
    "STEP_FAILED",
}
"""The row that says `any`."""
NOT_FOR_CLIENTS = {
    "CLIENT_GONE": "nobody is there to read it",
    "EXECUTOR_NOT_FOUND": "the operator's API",
    "GATEWAY_NOT_FOUND": "the operator's API",
    "REQUEST_NOT_FOUND": "the operator's API",
    "GATEWAY_TOO_SLOW": "between services",
    "REPLACED": "between services",
    "SCHEDULER_STOPPING": "between services",
    "STALE_TERM": "between services",
    "WRONG_CELL": "between services",
}


def reasons() -> Iterator[str]:
    """Yield what stands, or is named, as an argument of a call that makes an error."""
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*.py"):
            yield from _reasons_in(path)


def _reasons_in(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    makers = {"ServiceError", "unavailable", "_unavailable", "_unauthenticated", "cancelled", "_not_there", "_miss"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in makers:
            for each in node.args[:2]:
                value = constants.get(each.id) if isinstance(each, ast.Name) else getattr(each, "value", None)
                if isinstance(value, str) and _REASON.fullmatch(value):
                    yield value


def test_every_reason_is_told() -> None:
    """Those of gateway and scheduler, and the client's own; those that no client sees are listed above, with why."""
    found = set(reasons())
    assert {"QUEUE_FULL", "SHUTTING_DOWN", "OUTPUT_CHANGED", "MISSING_API_KEY", "POISON"} <= found
    told = set(re.findall(r"`([A-Z_]+)`", PAGE))
    assert found - told - ANY_INTERNAL - NOT_FOR_CLIENTS.keys() == set()
    assert ANY_INTERNAL | NOT_FOR_CLIENTS.keys() <= found, "what is left out exists"


def test_no_row_tells_of_what_is_not_there() -> None:
    """Each reason of the table stands in the source."""
    source = "".join(path.read_text() for folder in SOURCES for path in (ROOT / folder).rglob("*.py"))
    listed = {reason for _, cell in _ROW.findall(PAGE) for reason in re.findall(r"`(\w+)`", cell)}
    assert {"QUEUE_TTL", "DEADLINE", "TAKEN_UP"} <= listed
    assert {reason for reason in listed if f'"{reason}"' not in source and f"{reason} =" not in source} == set()
