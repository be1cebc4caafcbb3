"""Figures as people read them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Return a time span in at most two units: 0.4s, 12s, 3m05s, 2h10m, 4d06h."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    for unit, large, small, fine in (("m", 60, 1, "s"), ("h", 3600, 60, "m")):
        if whole < large * (60 if unit == "m" else 24):
            return f"{whole // large}{unit}{whole % large // small:02}{fine}"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def size(num_bytes: float) -> str:
    """Return a number of bytes in binary units: 512 B, 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def counted(number: int, noun: str) -> str:
    """Return a number of things: 1 gateway, 2 gateways."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def share(part: float, whole: float) -> str:
    """Return a share in per cent; "-" of nothing."""
    return f"{100 * part / whole:.0f}%" if whole else "-"
