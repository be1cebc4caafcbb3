"""Names, addresses and look-ups."""

from __future__ import annotations

import pytest

from scheduler_svc.executor_directory import Target, TargetsError, parse_targets, resolve


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("127.0.0.1:50053", [Target("127.0.0.1", 50053)]),
        ("a:1, b:2,", [Target("a", 1), Target("b", 2)]),
        ("executors.cell.svc:50053", [Target("executors.cell.svc", 50053)]),
        ("[::1]:7", [Target("::1", 7)]),
    ],
)
def test_lists_and_names_are_read(text: str, targets: list[Target]) -> None:
    """host:port entries apart by commas; IPv6 in brackets."""
    assert parse_targets(text) == targets


@pytest.mark.parametrize("text", ["", " , ", "host", "host:", ":1", "host:0", "host:65536", "host:x", "a:1,b"])
def test_what_is_no_address_is_named(text: str) -> None:
    """A bad entry is an error that shows it."""
    with pytest.raises(TargetsError, match="host:port"):
        parse_targets(text)


@pytest.mark.asyncio
async def test_the_systems_resolver_gives_numeric_addresses() -> None:
    """Each address of a name once, with the port, ready to dial; a name nobody knows is an OSError."""
    assert await resolve("127.0.0.1", 5) == ["127.0.0.1:5"]
    assert await resolve("::1", 5) == ["[::1]:5"]
    assert "127.0.0.1:5" in await resolve("localhost", 5)
    with pytest.raises(OSError, match=r".+"):
        await resolve("no-such-host.invalid", 5)
