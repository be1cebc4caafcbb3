"""A run as JSON: everything, for programs and for later. docs/bench.md describes the fields."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
from datetime import datetime
from pathlib import Path
from typing import Any

from octavo.bench.profile import Profile
from octavo.bench.records import Record
from octavo.bench.report import notes_on
from octavo.bench.session import Outcome

SCHEMA = "octavo.bench/1"
"""Rises when a field changes its meaning or goes; new fields alone do not raise it."""
_LIBRARIES = ("octavo", "grpcio", "httpx", "uvloop")
_MICROSECONDS = 6


def document(outcome: Outcome, started_at: datetime) -> dict[str, Any]:
    """Return the whole run. Times are in seconds; those of requests count from the run's start."""
    return {
        "schema": SCHEMA,
        "started_at": started_at.isoformat(timespec="seconds"),
        "environment": environment() | {"load_average": list(outcome.load_average)},
        "target": dataclasses.asdict(outcome.info),
        "settings": _settings(outcome),
        "was_stopped": outcome.result.was_stopped,
        "notes": notes_on(outcome),
        "figures": dataclasses.asdict(outcome.figures),
        "profile": _profile(outcome.profile),
        "requests": [_request(record, outcome.result.origin) for record in outcome.result.records],
    }


def environment() -> dict[str, Any]:
    """Return what of this machine and its software bears on the figures."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "versions": {name: version for name in _LIBRARIES if (version := _version(name))},
    }


def _settings(outcome: Outcome) -> dict[str, Any]:
    settings = dataclasses.asdict(outcome.settings)
    for name in ("input_tokens", "output_tokens"):
        settings[name] = str(settings[name])
    for name in ("trace", "prompts"):
        settings[name] = str(settings[name]) if settings[name] is not None else None
    return settings


def _profile(profile: Profile | None) -> dict[str, Any] | None:
    return None if profile is None else dataclasses.asdict(profile) | {"seconds": profile.seconds}


def _request(record: Record, origin: float) -> dict[str, Any]:
    def rounded(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds, _MICROSECONDS)

    return {
        "index": record.index,
        "status": record.status,
        "message": record.message,
        "scheduled": rounded(record.scheduled - origin),
        "sent": rounded(record.sent - origin),
        "ended": rounded(record.ended - origin),
        "ttft": rounded(record.ttft),
        "tpot": rounded(record.tpot),
        "e2e": rounded(record.e2e),
        "prompt_tokens": record.prompt_tokens,
        "asked_tokens": record.asked_tokens,
        "output_tokens": record.output_tokens,
        "is_counted_by_server": record.is_counted_by_server,
        "gaps": [rounded(gap) for gap in record.gaps],
        "delta_tokens": record.delta_tokens,
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
