"""What every public rpc does first."""

from __future__ import annotations

from typing import Any

import grpc.aio
from google.protobuf.message import Message

from gateway.auth import ApiKeys
from gateway.unknown_fields import refuse_unknown_fields

AUTHORIZATION_KEY = "authorization"


def check_call(keys: ApiKeys, request: Message, context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Return the tenant of a call.

    Raises ServiceError: UNAUTHENTICATED without a good key, then INVALID_ARGUMENT for fields that are not known.
    """
    metadata = dict(context.invocation_metadata() or ())
    authorization = metadata.get(AUTHORIZATION_KEY)
    tenant = keys.tenant_of(authorization if isinstance(authorization, str) else None)
    refuse_unknown_fields(request)
    return tenant
