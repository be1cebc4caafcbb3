"""The picture of `make chaos`: who is up, what stands still, what has been done."""

from __future__ import annotations

import io
import time

from chaos_faults import Done
from chaos_requests import Wanted
from chaos_show import ChaosShow


class Services:
    """A cell of two."""

    def __init__(self) -> None:
        self.executor = "up"

    def states(self) -> dict[str, str]:
        return {"gateway-0": "up", "executor-0": self.executor}


def test_the_picture() -> None:
    """The services, a row for each stream that runs, which says when it stands still, and the last faults."""
    services, faults = Services(), [Done("kill executor", "executor-0", 1.5)]
    wanted = [Wanted([3], {"max_tokens": 10, "n": count}, 0.0) for count in (1, 2, 1)]
    show = ChaosShow(services, faults, wanted)
    now = time.monotonic()
    for _ in range(5):
        show.got(0)
        show.got(1)
    show.got(2)
    show.ended(2, "Error()")
    services.executor = "dead"
    lines = show.lines(now + 20.0, 30)
    assert "gateway-0 up   executor-0 DEAD" in lines[0]
    assert "1 of 3 streams have ended, 1 of them with an error" in lines[1]
    rows = [line for line in lines if "tokens" in line]
    assert [row.count("#") for row in rows] == [16, 8]
    assert all("stands still, " in row for row in rows)
    assert "stands still" not in "".join(show.lines(time.monotonic(), 30)[3:])
    assert lines[-1] == "  1.5 s   kill executor: executor-0"
    assert len(show.lines(now, 7)) <= 7


def test_it_is_drawn_over_what_was_there() -> None:
    """From the top of the screen, each line to its end, and nothing of an earlier picture below."""
    out = io.StringIO()
    ChaosShow(Services(), [], [], out).draw()
    assert out.getvalue().startswith("\x1b[H")
    assert out.getvalue().endswith("\x1b[J")
    assert out.getvalue().count("\x1b[K\n") == out.getvalue().count("\n")
