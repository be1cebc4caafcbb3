"""Page tokens of the lists that operators read: opaque to them, checked when they come back."""

from __future__ import annotations

import base64
import math
import zlib

from scheduler_svc.request_record import RequestId

MAX_PAGE_SIZE = 1000
"""Most entries on a page: a page is made in one go, and steps wait for it."""


def make_token(kind: str, term: int, place: tuple[float, RequestId], *further: int) -> str:
    """Return a page token of one kind of list: where a page begins (arrival, request), and numbers of its own."""
    arrival, (incarnation, counter) = place
    numbers = ":".join(map(str, (term, *further, counter)))
    text = f"{kind}:{arrival.hex()}:{numbers}:{incarnation}".encode()
    # A token that was cut or mistyped would else be a place too, and pages would begin there.
    return base64.urlsafe_b64encode(zlib.crc32(text).to_bytes(4) + text).decode()


def read_token(kind: str, token: str, term: int, *, num_further: int = 0) -> tuple[float, RequestId, tuple[int, ...]]:
    """Return arrival, request and the further numbers of a token. Raises ValueError with what a token must be.

    A token counts only where it was given, by the scheduler of this term: places are on its clock.
    """
    try:
        decoded = base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True)
        checksum, text = decoded[:4], decoded[4:]
        found, arrival, *numbers, incarnation = text.decode().split(":", 4 + num_further)
        given_by, *further, counter = map(int, numbers)
        place = float.fromhex(arrival)
        is_whole = zlib.crc32(text).to_bytes(4) == checksum and found == kind and len(further) == num_further
        if not (is_whole and math.isfinite(place)):
            raise ValueError(token)
    except (ValueError, OverflowError):
        raise ValueError("must be the next_page_token of the page before") from None
    if given_by != term:
        raise ValueError("was given by a scheduler that is gone; start again without one")
    return place, (incarnation, counter), tuple(further)
