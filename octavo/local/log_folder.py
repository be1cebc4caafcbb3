"""Where a run keeps its logs, and how long: those of runs that have ended go when newer ones have come."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from octavo.local.plan import PlanError

KEPT_RUNS = 10
"""Folders of ended runs that stay."""


@contextmanager
def log_folder(home: Path) -> Iterator[Path]:
    """Make the folder for one run's logs, `home`/logs/TIME-PID, and hold it while the body runs.

    Of the runs that have ended, by whatever end, the last ten are kept; what another process holds is left alone.
    Raises PlanError where there can be no folder.
    """
    logs = home / "logs"
    with contextlib.ExitStack() as held:
        try:
            logs.mkdir(parents=True, exist_ok=True)
            # One at a time: nobody is to remove a folder that is made and not held yet.
            with _locked(logs):
                _remove_old(logs)
                folder = _new_folder(logs)
                held.enter_context(_locked(folder))
        except OSError as error:
            hint = "set OCTAVO_HOME to a folder that can be written, with room for logs and models"
            raise PlanError(f"logs cannot be kept in {logs}: {error.strerror or error}", hint) from error
        yield folder


def _new_folder(logs: Path) -> Path:
    name = f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-{os.getpid()}"
    # One process may run several cells within a second.
    for further in ("", *(f"-{count}" for count in range(2, 100))):
        with contextlib.suppress(FileExistsError):
            folder = logs / f"{name}{further}"
            folder.mkdir()
            return folder
    raise FileExistsError(f"{logs / name}")


def _remove_old(logs: Path) -> None:
    ended = [path for path in sorted(logs.iterdir()) if path.is_dir() and not _is_held(path)]
    for old in ended[:-KEPT_RUNS]:
        with contextlib.suppress(OSError):
            shutil.rmtree(old)


def _is_held(folder: Path) -> bool:
    try:
        with _locked(folder, wait=False):
            return False
    except OSError:  # held, or nothing that can be told: it is left alone
        return True


@contextmanager
def _locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Lock a folder (flock(2)): a lock ends with its process, however that ends, and is no file to be left behind.

    Raises BlockingIOError where another has it and `wait` is False, OSError where there are no locks.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)
