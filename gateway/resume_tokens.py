"""Resume tokens: what lets a client take its stream up at any gateway of the cell, and nobody else.

A token is two parts in base64 (RFC 4648, URL-safe, unpadded) with a dot between: a JSON list of cell, incarnation and
counter of the request, tenant and expiry (seconds since 1970), and the HMAC-SHA256 (RFC 2104) of it under the key
that all gateways of the cell share. It is signed and not encrypted: there is no secret in it.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import secrets
import time
from collections.abc import Callable

import grpc

from octavo.rpc.errors import FieldViolation, ServiceError, invalid_argument

LIFE = 86_400.0
"""Seconds that a token is good for: a request that runs longer cannot be taken up at its end."""

_MOST_CHARACTERS = 1024

RequestId = tuple[str, int]


class ResumeTokens:
    """Makes and reads the tokens of one cell. `wall_clock`: seconds since 1970, as all gateways have them."""

    def __init__(self, key: str | None, cell: str, wall_clock: Callable[[], float] = time.time) -> None:
        """`key`: the secret; None: one of this process alone."""
        self._key = secrets.token_bytes(32) if key is None else key.encode()
        self._cell = cell
        self._wall_clock = wall_clock

    def make(self, request_id: RequestId, tenant: str) -> str:
        """Return a token for a request."""
        expires = int(self._wall_clock() + LIFE)
        payload = json.dumps([self._cell, *request_id, tenant, expires], separators=(",", ":")).encode()
        return f"{_encoded(payload)}.{_encoded(self._signature(payload))}"

    def open(self, token: str, tenant: str, field: str) -> RequestId:
        """Return whose token it is. Raises ServiceError naming `field`: INVALID_ARGUMENT for what is no token of this
        cell, PERMISSION_DENIED for another tenant's, NOT_FOUND for one that has expired.
        """
        what = "is no resume token of this cell and its OCTAVO_RESUME_KEY"
        no_token = invalid_argument([FieldViolation(field, what)])
        first, _, second = token.partition(".")
        if not (token.isascii() and len(token) <= _MOST_CHARACTERS):
            raise no_token
        try:
            payload, signature = _decoded(first), _decoded(second)
        except binascii.Error:
            raise no_token from None
        if not hmac.compare_digest(signature, self._signature(payload)):
            raise no_token
        cell, incarnation, counter, owner, expires = json.loads(payload)
        if cell != self._cell:
            raise no_token
        if owner != tenant:
            message = "the resume token is of another tenant: use the API key that the request was made with"
            raise ServiceError(grpc.StatusCode.PERMISSION_DENIED, "OTHER_TENANT", message)
        if self._wall_clock() >= expires:
            raise ServiceError(grpc.StatusCode.NOT_FOUND, "NOTHING_TO_RESUME", "the resume token has expired")
        return incarnation, counter

    def _signature(self, payload: bytes) -> bytes:
        return hmac.digest(self._key, payload, "sha256")


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decoded(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
