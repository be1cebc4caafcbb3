"""API keys: who calls, and on whose account."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path

import grpc

from octavo.rpc.errors import ServiceError

DEFAULT_TENANT = "default"
"""Who pays where a gateway was given no keys: everybody."""
MAX_TENANT_CHARACTERS = 64
MIN_KEY_CHARACTERS = 8


class ApiKeysError(Exception):
    """A file of keys that cannot be used. The message names file and line, and never a key."""


class ApiKeys:
    """The keys that a gateway takes, each with its tenant. Immutable. Only hashes of keys are kept."""

    def __init__(self, tenants: Mapping[str, str] | None) -> None:
        """`tenants`: by key. None: nobody needs a key, and everybody is DEFAULT_TENANT."""
        self._tenants = None if tenants is None else {_digest(key): tenant for key, tenant in tenants.items()}

    def tenant_of(self, authorization: str | None) -> str:
        """Return whose key it is. `authorization`: the header or metadata of that name, `Bearer KEY`.

        Raises ServiceError (UNAUTHENTICATED): MISSING_API_KEY, INVALID_API_KEY.
        """
        if self._tenants is None:
            return DEFAULT_TENANT
        if not authorization:
            raise _unauthenticated("MISSING_API_KEY", "an API key is required: send `authorization: Bearer KEY`")
        scheme, _, key = authorization.strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthenticated("INVALID_API_KEY", "the authorization is not of the form `Bearer KEY`")
        given = _digest(key.strip())
        tenant = None
        # All of them, each in constant time: how long it takes tells nothing of any key.
        for digest, owner in self._tenants.items():
            if hmac.compare_digest(digest, given):
                tenant = owner
        if tenant is None:
            raise _unauthenticated("INVALID_API_KEY", "the API key is not one that this gateway takes")
        return tenant


def read_api_keys(file: Path) -> ApiKeys:
    """Return the keys of a file: lines of tenant and key; empty ones, and what begins with #, are skipped.

    A tenant may have several keys. Raises ApiKeysError.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ApiKeysError(f"{file} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ApiKeysError(f"{file} is not UTF-8 text") from error
    tenants: dict[str, str] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"{file}, line {number}"
        if len(words) != 2:
            counted = "1 word" if len(words) == 1 else f"{len(words)} words"
            raise ApiKeysError(f"{where}: must be a tenant and a key, with a space between, has {counted}")
        tenant, key = words
        if len(tenant) > MAX_TENANT_CHARACTERS or not tenant.isprintable():
            raise ApiKeysError(f"{where}: a tenant has at most {MAX_TENANT_CHARACTERS} printable characters")
        if len(key) < MIN_KEY_CHARACTERS or not (key.isascii() and key.isprintable()):
            raise ApiKeysError(f"{where}: a key has at least {MIN_KEY_CHARACTERS} characters, all of printable ASCII")
        if key in tenants:
            raise ApiKeysError(f"{where}: the key is that of line {lines[key]}: each stands for one tenant")
        tenants[key] = tenant
        lines[key] = number
    if not tenants:
        raise ApiKeysError(f"{file} has no keys, so nobody could call: write lines of tenant and key")
    return ApiKeys(tenants)


def _digest(key: str) -> bytes:
    # All of one length, which compare_digest needs in order to tell nothing.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _unauthenticated(reason: str, message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.UNAUTHENTICATED, reason, message)
