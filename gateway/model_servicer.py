"""octavo.v1.ModelService: which models are served."""

from __future__ import annotations

import base64
from typing import Any

import grpc.aio

from gateway.auth import ApiKeys
from gateway.cell import Cell
from gateway.convert import model_to_proto
from gateway.rpc_calls import check_call
from gateway.served_models import ServedModels
from gateway.validation import DEFAULT_PAGE_SIZE, check_page_size
from octavo.rpc.errors import FieldViolation, invalid_argument
from octavo.v1 import model_pb2, model_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """Lists and describes the served models. Every call needs a key where there are keys."""

    def __init__(self, models: ServedModels, cell: Cell, keys: ApiKeys) -> None:
        self._models = models
        self._cell = cell
        self._keys = keys

    async def ListModels(  # noqa: N802
        self, request: model_pb2.ListModelsRequest, context: _Context
    ) -> model_pb2.ListModelsResponse:
        """Answer with a page of models, sorted by name."""
        check_call(self._keys, request, context)
        violations = list(check_page_size(request.page_size))
        after = _name_from_token(request.page_token)
        if after is None:
            violations.append(FieldViolation("page_token", "is none that ListModels gave"))
        if after is None or violations:
            raise invalid_argument(violations)
        rest = [model for model in self._models if model.name > after]
        page = rest[: request.page_size or DEFAULT_PAGE_SIZE]
        return model_pb2.ListModelsResponse(
            models=[model_to_proto(model.prepared, self._cell.pool(model.prepared)) for model in page],
            next_page_token=_token_from_name(page[-1].name) if len(page) < len(rest) else "",
        )

    async def GetModel(  # noqa: N802
        self, request: model_pb2.GetModelRequest, context: _Context
    ) -> model_pb2.GetModelResponse:
        """Answer with one model."""
        check_call(self._keys, request, context)
        if not request.name:
            raise invalid_argument([FieldViolation("name", "is required")])
        prepared = self._models.resolve(request.name).prepared
        return model_pb2.GetModelResponse(model=model_to_proto(prepared, self._cell.pool(prepared)))


def _token_from_name(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode()


def _name_from_token(token: str) -> str | None:
    """Return the name that the last page ended with, "" for the first page, None for what is no token."""
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except ValueError:
        return None
