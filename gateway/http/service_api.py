"""Everything but generation: models, tokens, health, version, metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from gateway.cell import Cell
from gateway.http.commands import tokenize_input
from gateway.http.errors import Rename, failure_from
from gateway.http.fields import DetokenizeRequest, TokenizeRequest
from gateway.http.names import chat_name, detokenize_name
from gateway.http.pages import Answers, answers
from gateway.http.shapes import DetokenizedText, Health, ModelFields, ModelList, Tokens, Version
from gateway.served_models import ServedModels
from gateway.text_tools import TextTools
from octavo.rpc.errors import ServiceError
from octavo.rpc.metrics import encoder_for


class ServiceApi:
    """The endpoints that tell and convert."""

    def __init__(
        self,
        models: ServedModels,
        cell: Cell,
        tools: TextTools,
        registry: CollectorRegistry,
        is_serving: Callable[[], bool],
    ) -> None:
        """`registry`: what the metrics page shows. `is_serving`: what grpc.health.v1 says of the whole gateway."""
        self._models = models
        self._cell = cell
        self._tools = tools
        self._registry = registry
        self._is_serving = is_serving
        self._created = int(time.time())

    def router(self) -> APIRouter:
        """Return the routes."""
        router = APIRouter()
        add = router.add_api_route
        add("/v1/models", self.list_models, tags=["models"], responses=answers(ModelList, statuses=(401,)))
        # Names may have slashes.
        path = "/v1/models/{model:path}"
        add(path, self.get_model, tags=["models"], responses=answers(ModelFields, statuses=(401, 404)))
        statuses = (400, 401, 404, 408, 413, 415, 503)
        add("/tokenize", self.tokenize, methods=["POST"], tags=["tokens"], responses=answers(Tokens, statuses=statuses))
        responses = answers(DetokenizedText, statuses=statuses)
        add("/detokenize", self.detokenize, methods=["POST"], tags=["tokens"], responses=responses)
        not_serving: Answers = {503: {"model": Health, "description": "Requests are refused now."}}
        add("/health", self.health, tags=["service"], responses={**answers(Health), **not_serving})
        add("/version", self.version, tags=["service"], responses=answers(Version))
        add("/metrics", self.metrics, tags=["service"], response_class=Response, responses=_METRICS_PAGE)
        # What checks and load balancers ask who want no body. The server leaves it out.
        for path, told in (("/health", self.health), ("/version", self.version)):
            add(path, told, methods=["HEAD"], include_in_schema=False)
        return router

    async def list_models(self) -> Response:
        """List the names that requests may use."""
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self._models.names()]})

    async def get_model(self, model: str) -> Response:
        """Describe one name."""
        if not model:
            # The list with a slash too many: elsewhere no name stands for the only model.
            raise HTTPException(404)
        try:
            self._models.resolve(model)
        except ServiceError as error:
            return _refused(error, str)
        return JSONResponse(self._model(model))

    async def tokenize(self, body: TokenizeRequest) -> Response:
        """Turn a text or a conversation into the tokens that generation would run on."""
        try:
            name, given = body.model or "", tokenize_input(body)
            token_ids = await self._tools.tokenize(name, given, add_special_tokens=body.add_special_tokens)
        except ServiceError as error:
            return _refused(error, chat_name)
        max_model_len = self._max_model_len(name)
        return JSONResponse({"tokens": token_ids, "count": len(token_ids), "max_model_len": max_model_len})

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        """Turn tokens into the text that generation would give."""
        try:
            skip_special_tokens = body.skip_special_tokens is not False
            text = await self._tools.detokenize(body.model or "", body.tokens, skip_special_tokens=skip_special_tokens)
        except ServiceError as error:
            return _refused(error, detokenize_name)
        return JSONResponse({"prompt": text})

    async def health(self) -> Response:
        """Tell whether requests are served, as grpc.health.v1 does."""
        if self._is_serving():
            return JSONResponse({"status": "serving"})
        return JSONResponse({"status": "not_serving"}, 503, {"retry-after": "1"})

    async def version(self) -> Response:
        """Tell the version."""
        return JSONResponse({"version": metadata.version("octavo")})

    async def metrics(self, request: Request) -> Response:
        """Show the metrics page, made at one moment: no await stands between two series."""
        encode, content_type = encoder_for(request.headers.get("accept", ""))
        names = request.query_params.getlist("name[]")
        source = self._registry.restricted_registry(names) if names else self._registry
        return Response(encode(source), headers={"content-type": content_type})

    def _model(self, name: str) -> dict[str, Any]:
        prepared = self._models.resolve(name).prepared
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "octavo",
            "root": prepared.name,
            "max_model_len": self._max_model_len(name),
            "supports_chat": prepared.chat_template is not None,
        }

    def _max_model_len(self, name: str) -> int:
        pool = self._cell.pool(self._models.resolve(name).prepared)
        return pool.max_model_len if pool else 0


_METRICS_PAGE: Answers = {
    200: {"description": "Metrics for Prometheus.", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


def _refused(error: ServiceError, rename: Rename) -> Response:
    failure = failure_from(error, rename)
    return JSONResponse(failure.body, failure.status, failure.headers)
