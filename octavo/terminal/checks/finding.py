"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How much a finding matters. PROBLEM: this machine cannot serve until it is put right."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the report. `advice` is what to do, None where nothing is."""

    section: str
    subject: str
    level: Level
    text: str
    advice: str | None = None
