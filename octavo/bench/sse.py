"""Server-sent events, as much of them as OpenAI-compatible servers send (WHATWG HTML, 9.2.6)."""

from __future__ import annotations


class SseReader:
    """Cuts a byte stream into the payloads of its events, however it was split on the way.

    Lines end in LF or CR LF. Comments and fields other than `data` are skipped; several data lines of one event are
    joined by LF; an event that its blank line never ended is no event.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the payloads of the events that `chunk` completes."""
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        payloads = []
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif not line and self._data:
                payloads.append(b"\n".join(self._data))
                self._data.clear()
        return payloads
