"""The ASGI application: endpoints, who may call them, limits, and errors of one shape."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from gateway.auth import ApiKeys
from gateway.early_refusals import EarlyRefusals
from gateway.http.answer import REQUEST_ID_HEADER
from gateway.http.caller import TOO_LARGE, TOO_SLOW, BodyLimit, KeyCheck, QueueCheck
from gateway.http.errors import INTERNAL, Failure, failure_from, failure_of_status
from gateway.http.pages import make_page
from gateway.http.refusals import failure_from_validation
from octavo.rpc.errors import ServiceError

_CODES = {404: "not_found", 405: "method_not_allowed"}


def make_app(
    routers: Sequence[APIRouter], keys: ApiKeys, early_refusals: EarlyRefusals, cors_origins: Sequence[str]
) -> FastAPI:
    """Return the application. `cors_origins`: whose pages may use it; `*` for all; none by default."""
    app = FastAPI(
        title="Octavo",
        version=metadata.version("octavo"),
        description="The OpenAI-compatible API of Octavo. Errors are those of OpenAI's API.",
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        # A slash too many leads nowhere: behind a proxy with TLS the redirect would send the key on in the clear.
        redirect_slashes=False,
    )
    for router in routers:
        app.include_router(router)
    app.add_exception_handler(RequestValidationError, _bad_body)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ServiceError, _service_error)
    app.add_exception_handler(Exception, _internal)
    # The last one added is the outermost: a browser's preflight has no key.
    app.add_middleware(BodyLimit)
    app.add_middleware(QueueCheck, early_refusals=early_refusals)
    app.add_middleware(KeyCheck, keys=keys)
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER, "retry-after", "retry-after-ms"],
        )
    page: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not page:
            page.update(make_page(app))
        return page

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to change the page
    return app


async def _bad_body(request: Request, error: Exception) -> Response:  # noqa: ARG001 - FastAPI's own
    assert isinstance(error, RequestValidationError)
    return _response(failure_from_validation(error.errors()))


async def _service_error(request: Request, error: Exception) -> Response:  # noqa: ARG001 - FastAPI's own
    assert isinstance(error, ServiceError)
    return _response(failure_from(error))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    match error.status_code:
        case 404:
            message = f"nothing is at {request.url.path[:100]}: /docs lists what there is"
        case 405:
            message = f"{request.method[:20]} is not for {request.url.path[:100]}"
        case TOO_LARGE.status:
            return _response(TOO_LARGE)
        case TOO_SLOW.status:
            return _response(TOO_SLOW)
        case 400:
            message = "the body is not valid JSON"
    failure = failure_of_status(error.status_code, message, _CODES.get(error.status_code, "invalid_request"))
    return _response(failure, error.headers)


async def _internal(request: Request, error: Exception) -> Response:  # noqa: ARG001 - FastAPI's own
    # The server logs it: Starlette raises it again behind this answer.
    return _response(INTERNAL)


def _response(failure: Failure, headers: Any = None) -> Response:
    return JSONResponse(failure.body, failure.status, {**(headers or {}), **failure.headers})
