"""The folders of runs' logs: those of runs that have ended are few, those of runs that go on are all there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from octavo.local.log_folder import KEPT_RUNS, log_folder
from octavo.local.plan import PlanError

TIMEOUT = 30.0
HOLD = """
import sys
from pathlib import Path
from octavo.local.log_folder import log_folder
with log_folder(Path(sys.argv[1])) as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


def names(home: Path) -> list[str]:
    """Return what lies in the logs."""
    return sorted(path.name for path in (home / "logs").iterdir())


def test_logs_of_the_last_ten_ended_runs_are_kept(tmp_path: Path) -> None:
    """A further run removes the oldest folders beyond ten and touches nothing else in there."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "note.txt").write_text("mine")
    for day in range(10, 22):
        (tmp_path / "logs" / f"202001{day}-000000-1").mkdir()
    with log_folder(tmp_path) as newest:
        assert newest.is_dir()
    assert len(names(tmp_path)) == KEPT_RUNS + 2
    assert names(tmp_path)[0] == "20200112-000000-1"
    assert {newest.name, "note.txt"} <= set(names(tmp_path))


def test_a_home_without_room_for_logs_is_named(tmp_path: Path) -> None:
    """Where nothing can be made, or a file is in the way: the place, the system's word, and what to set."""
    (tmp_path / "file").touch()
    for home, why in ((Path("/proc/octavo"), "No such file"), (tmp_path / "file", "Not a directory")):
        with pytest.raises(PlanError, match=f"logs cannot be kept in {home}/logs: {why}") as caught, log_folder(home):
            pass
        assert "OCTAVO_HOME" in (caught.value.hint or "")


def test_logs_of_a_run_that_goes_on_are_kept(tmp_path: Path) -> None:
    """However many runs come and end meanwhile; once it has ended, even killed, it counts as the others do."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            live = Path(process.stdout.readline().strip())
            (live / "gateway.log").write_text("what matters")
            # So old that it is the first to go.
            live = live.rename(live.with_name("20200101-000000-1"))
            for _ in range(KEPT_RUNS + 2):
                with log_folder(tmp_path):
                    pass
            assert (live / "gateway.log").read_text() == "what matters"
            assert len(names(tmp_path)) == KEPT_RUNS + 2
        finally:
            process.kill()
            process.wait(TIMEOUT)
    with log_folder(tmp_path):
        assert not live.exists()


def test_runs_of_one_process_have_folders_of_their_own(tmp_path: Path) -> None:
    """Two that begin within a second do not meet."""
    with log_folder(tmp_path) as one, log_folder(tmp_path) as other:
        assert one != other
        assert one.parent == other.parent == tmp_path / "logs"
