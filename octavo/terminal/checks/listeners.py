"""Who listens on a port of this machine, by /proc (proc(5)), as far as the user may see it."""

from __future__ import annotations

import socket
from pathlib import Path

_LISTEN = "0A"


def is_listening(host: str, port: int, timeout: float = 1.0) -> bool:
    """Tell whether something accepts connections."""
    try:
        with socket.create_connection((host, port), timeout):
            return True
    except OSError:
        return False


def listener_of(port: int, root: Path = Path("/")) -> str | None:
    """Return the program that listens on a TCP port, as "name (pid 123)"; None where the user may not know."""
    inodes = _listening_inodes(port, root)
    if not inodes:
        return None
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in (root / "proc").iterdir():
        if not process.name.isdecimal():
            continue
        try:
            if any(str(link.readlink()) in wanted for link in (process / "fd").iterdir()):
                return f"{(process / 'comm').read_text().strip()} (pid {process.name})"
        except OSError:
            continue  # another user's process, or one that has just ended
    return None


def _listening_inodes(port: int, root: Path) -> set[str]:
    found = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (root / "proc/net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            local, state, inode = fields[1], fields[3], fields[9]
            if state == _LISTEN and int(local.rpartition(":")[2], 16) == port:
                found.add(inode)
    return found
