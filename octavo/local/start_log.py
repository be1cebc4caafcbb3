"""What a service's log says of its start, read while it is written. octavo.rpc.stages says what is in it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StageDone:
    """A stage that is over, and the seconds it took."""

    stage: str
    seconds: float


@dataclass(frozen=True)
class StageProgress:
    """A stage under way: bytes done and bytes in all."""

    stage: str
    done: int
    total: int


class StartLog:
    """Follows one log file from its present end."""

    def __init__(self, path: Path) -> None:
        """The file need not exist yet."""
        self._path = path
        self._at = path.stat().st_size if path.exists() else 0
        self._rest = b""

    def news(self) -> list[StageDone | StageProgress]:
        """Return what has been written since the last call, in order."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except OSError:
            return []
        self._at += len(data)
        # The last line may be half written.
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [event for event in map(_event, lines) if event is not None]


def _event(line: bytes) -> StageDone | StageProgress | None:
    if b'"stage"' not in line:
        return None
    try:
        fields = json.loads(line)
        if "seconds" in fields:
            return StageDone(str(fields["stage"]), float(fields["seconds"]))
        return StageProgress(str(fields["stage"]), int(fields["done"]), int(fields["total"]))
    except (ValueError, KeyError, TypeError):  # a line of somebody else's
        return None
