"""What calls raise: one class per status code, with words for the person who reads them."""

from __future__ import annotations

import re
from dataclasses import dataclass

import grpc

from octavo.rpc.errors import FieldViolation, ServiceError, from_rpc_error


class InvalidArgumentError(ServiceError):
    """Something about the request is wrong; `violations` names every bad field."""


class NotFoundError(ServiceError):
    """No such model, or no such live request."""


class UnavailableError(ServiceError):
    """Nobody could do it now: no connection, no executor, a shutdown. `retry_delay`: seconds, where it is known."""


class DeadlineExceededError(ServiceError):
    """A limit of time passed first, or could no longer be kept; the request was ended.

    `reason`: DEADLINE for the call's timeout, QUEUE_TTL, FIRST_TOKEN_TARGET. Where this side's own timer was the first,
    the reason is DEADLINE_EXCEEDED.
    """


class ResourceExhaustedError(ServiceError):
    """The cell has no room for the request now. `retry_delay`: seconds, where it is known."""


class RequestCancelledError(ServiceError):
    """Somebody ended the request: another thread or task, a closed client, an operator (see `reason`)."""


class FailedPreconditionError(ServiceError):
    """The request cannot be served as things stand."""


class PermissionDeniedError(ServiceError):
    """The caller may not do this."""


class UnauthenticatedError(ServiceError):
    """The caller did not say who it is."""


class UnimplementedError(ServiceError):
    """The peer does not know the call: it is of another version, or no Octavo service."""


class InternalServiceError(ServiceError):
    """The service failed; its log has the cause."""


ERROR_CLASSES: dict[grpc.StatusCode, type[ServiceError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhaustedError,
    grpc.StatusCode.CANCELLED: RequestCancelledError,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPreconditionError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.UNIMPLEMENTED: UnimplementedError,
    grpc.StatusCode.INTERNAL: InternalServiceError,
}
"""The class of each status code. Any other code raises ServiceError itself."""

_OWN_ENDS = (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
_DEADLINE = "DEADLINE"
"""The service's reason where it was the call's own deadline that passed."""
START_HINT = "`octavo up MODEL` starts a cell, `octavo doctor` says what runs"
_CANNOT_CONNECT = "cannot connect to "
_CONNECT_FAILED = re.compile(r"failed to connect|DNS resolution failed|connection attempt timed out", re.IGNORECASE)
_SYSTEM_REASON = re.compile(r"connect: (.+?) \(\d+\)")


@dataclass(frozen=True)
class CallInfo:
    """What an error's words need to know of the call: whom it asked, for what, and for how many seconds."""

    peer: str
    rpc: str
    timeout: float | None


def error_from(rpc_error: grpc.RpcError, call: CallInfo) -> ServiceError:
    """Return the typed error of a call that failed."""
    error = from_rpc_error(rpc_error)
    error_class = ERROR_CLASSES.get(error.code, ServiceError)
    return error_class(
        error.code,
        error.reason,
        _message(error, call),
        metadata=error.metadata,
        violations=error.violations,
        retry_delay=error.retry_delay,
    )


def peer_error(rpc_error: grpc.RpcError, call: CallInfo, *, is_ours: bool) -> ServiceError:
    """Return the typed error of a call that failed. `is_ours`: this process may have cancelled it.

    Else a CANCELLED that no service gives a reason for is UNAVAILABLE to whoever asks: a server of gRPC's that closes
    says it of calls that have come and that it has not begun.
    """
    error = error_from(rpc_error, call)
    if is_ours or error.code is not grpc.StatusCode.CANCELLED or error.reason != error.code.name:
        return error
    return unavailable("CALL_DROPPED", f"{call.peer} is closing and has dropped {call.rpc}; ask again")


def is_of_transport(error: ServiceError) -> bool:
    """Tell whether no service has said that, since each says why, nor this side: the connection is at fault."""
    return error.reason == error.code.name and error.code not in _OWN_ENDS


def could_not_connect(error: ServiceError) -> bool:
    """Tell whether nobody was reached, from a connection that was lost and from a peer's own refusal."""
    return error.code is grpc.StatusCode.UNAVAILABLE and error.message.startswith(_CANNOT_CONNECT)


def invalid(field: str, description: str) -> InvalidArgumentError:
    """Return the error for one bad argument that is found before anything is sent."""
    return InvalidArgumentError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_REQUEST",
        f"{field}: {description}",
        violations=[FieldViolation(field, description)],
    )


def cancelled(reason: str, message: str) -> RequestCancelledError:
    """Return the error for a call that this process ended."""
    return RequestCancelledError(grpc.StatusCode.CANCELLED, reason, message)


def damaged() -> UnavailableError:
    """Return the error for an answer whose bytes were changed on the way, or a stream that ended before its end."""
    return unavailable("DAMAGED_STREAM", "the bytes of the answer were changed on the way")


def unavailable(reason: str, message: str) -> UnavailableError:
    """Return the error for a service that could not be found."""
    return UnavailableError(grpc.StatusCode.UNAVAILABLE, reason, message)


def _message(error: ServiceError, call: CallInfo) -> str:
    # A peer of ours always gives a reason; where it is the bare code, the words are the transport's.
    is_from_transport = error.reason == error.code.name
    match error.code:
        case grpc.StatusCode.DEADLINE_EXCEEDED if call.timeout is not None and (
            is_from_transport or error.reason == _DEADLINE
        ):
            # Whose timer fires first is chance, so the words do not depend on it.
            return f"the call was not complete within its timeout of {call.timeout:g} s; give it a longer one"
        case grpc.StatusCode.UNAVAILABLE if is_from_transport:
            return _connection_message(error.message, call)
        case grpc.StatusCode.CANCELLED if is_from_transport:
            return f"{call.rpc} was cancelled before it was complete, as by closing its client"
        case grpc.StatusCode.UNIMPLEMENTED if is_from_transport:
            return f"{call.peer} does not know {call.rpc}: it is of another version, or no Octavo service"
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.RESOURCE_EXHAUSTED if error.retry_delay is not None:
            # Octavo's own services end with the advice already, in words.
            message = error.message.removesuffix(": try again shortly")
            return f"{message} (try again in {error.retry_delay:g} s)"
    return error.message


def _connection_message(details: str, call: CallInfo) -> str:
    if _CONNECT_FAILED.search(details):
        found = _SYSTEM_REASON.search(details)
        return f"{_CANNOT_CONNECT}{call.peer}: {found[1].lower() if found else details}; {START_HINT}"
    return f"the connection to {call.peer} was lost: {details}; ask again, or see `octavo doctor`"
