"""Clients for an event loop. What they take, return and raise is what the blocking ones do."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self, Unpack

from octavo.client import kv_convert, request_convert, response_convert
from octavo.client.admin_types import Load, RequestInfo
from octavo.client.async_connection import AsyncConnection
from octavo.client.async_stream import AsyncGenerateStream
from octavo.client.client_resume import ResumePoint, ask_for_grace
from octavo.client.client_rpcs import (
    CANCEL_REQUEST,
    COUNT_TOKENS,
    DETOKENIZE,
    DRAIN,
    FLUSH_PREFIX_CACHE,
    GENERATE_ONCE,
    GET_KV_STATE,
    GET_LOAD,
    GET_MODEL,
    LIST_MODELS,
    LIST_REQUESTS,
    SCORE,
    TOKENIZE,
)
from octavo.client.discovery import ADMIN, GATEWAY, Api, given_api_key
from octavo.client.kv_types import KvState
from octavo.client.types import Completion, GenerateOptions, Messages, Model, Prompt, Scores, TokenCount
from octavo.v1 import admin_pb2


class _AsyncClient:
    """What both clients are: an owner of one connection."""

    def __init__(self, api: Api, address: str | Sequence[str] | None, api_key: str | None = None) -> None:
        self._connection = AsyncConnection(api, address, api_key)

    @property
    def address(self) -> str | None:
        """Where the gateway is, host:port; None until it has been looked for."""
        return self._connection.address

    async def close(self) -> None:
        """Close the connection. Requests under way are cancelled; their readers get RequestCancelledError."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class AsyncClient(_AsyncClient):
    """A client of a gateway for asyncio: see Client, whose methods it has.

        async with octavo.AsyncClient() as client:
            async for delta in client.generate("Once upon a time", max_tokens=64):
                print(delta.text, end="")

    It may be made anywhere and belongs to the event loop that uses it first. Cancelling a task that waits for it
    cancels the request on the server. Have one event loop at a time in a process use gRPC: where two do, gRPC logs a
    BlockingIOError now and then. Threads take Client.
    """

    def __init__(self, address: str | Sequence[str] | None = None, *, api_key: str | None = None) -> None:
        super().__init__(GATEWAY, address, api_key if api_key is not None else given_api_key())

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerateStream:
        """Return the stream of what the model writes after `prompt`: text, token ids, or a conversation.

        Nothing is sent before the stream is read. Raises TypeError and InvalidArgumentError for options that cannot be
        sent; the stream's loop raises all else.
        """
        request = request_convert.generate_request(prompt, options)
        ask_for_grace(request)
        connection = self._connection
        point = ResumePoint(
            request, timeout, lambda: connection.num_addresses, is_known=lambda: connection.has_answered
        )
        return AsyncGenerateStream(connection, point, timeout)

    async def complete(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Return all that the model writes after `prompt`, once it is complete."""
        request = request_convert.generate_once_request(prompt, options)
        return response_convert.completion_from(await self._connection.unary(GENERATE_ONCE, request, timeout))

    async def score(
        self,
        prompt: Prompt,
        continuations: Sequence[str | Sequence[int]],
        *,
        model: str | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> Scores:
        """Return how likely each continuation of `prompt` is, text or token ids; 1 to 128. Nothing is generated."""
        request = request_convert.score_request(prompt, continuations, model, request_id)
        return response_convert.scores_from(await self._connection.unary(SCORE, request, timeout))

    async def count_tokens(
        self, prompt: str | Messages, *, model: str | None = None, timeout: float | None = None
    ) -> TokenCount:
        """Return how many tokens an input has, and how many input and output may have together."""
        request = request_convert.count_tokens_request(prompt, model)
        return response_convert.token_count_from(await self._connection.unary(COUNT_TOKENS, request, timeout))

    async def tokenize(
        self,
        prompt: str | Messages,
        *,
        model: str | None = None,
        add_special_tokens: bool | None = None,
        timeout: float | None = None,
    ) -> list[int]:
        """Return the token ids that `generate` would run on.

        `add_special_tokens`: False leaves out what the tokenizer adds to a text by itself, such as a BOS.
        """
        request = request_convert.tokenize_request(prompt, model, add_special_tokens)
        return list((await self._connection.unary(TOKENIZE, request, timeout)).token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str | None = None,
        skip_special_tokens: bool | None = None,
        timeout: float | None = None,
    ) -> str:
        """Return the text of token ids. `skip_special_tokens`: False writes special tokens out."""
        request = request_convert.detokenize_request(token_ids, model, skip_special_tokens)
        return (await self._connection.unary(DETOKENIZE, request, timeout)).text

    async def list_models(self, *, timeout: float | None = None) -> list[Model]:
        """Return the served models, by name. `timeout`: seconds for each page of a hundred."""
        models: list[Model] = []
        token = ""
        while True:
            page = await self._connection.unary(LIST_MODELS, request_convert.list_models_request(token), timeout)
            models += map(response_convert.model_from, page.models)
            token = page.next_page_token
            if not token:
                return models

    async def get_model(self, name: str, *, timeout: float | None = None) -> Model:
        """Return the description of a model. Raises NotFoundError."""
        request = request_convert.get_model_request(name)
        return response_convert.model_from((await self._connection.unary(GET_MODEL, request, timeout)).model)


class AsyncAdminClient(_AsyncClient):
    """A client of the operator's API for asyncio: see AdminClient, whose methods it has."""

    def __init__(self, address: str | Sequence[str] | None = None) -> None:
        super().__init__(ADMIN, address)

    async def list_requests(self, *, timeout: float | None = None) -> list[RequestInfo]:
        """Return the live requests, oldest first. `timeout`: seconds for each page of a thousand."""
        infos: list[RequestInfo] = []
        token = ""
        while True:
            page = await self._connection.unary(LIST_REQUESTS, request_convert.list_requests_request(token), timeout)
            infos += map(response_convert.request_info_from, page.requests)
            token = page.next_page_token
            if not token:
                return infos

    async def cancel_request(self, request_id: str, *, timeout: float | None = None) -> None:
        """End a live request by the gateway's id of it. Raises NotFoundError where it is not live."""
        await self._connection.unary(CANCEL_REQUEST, request_convert.cancel_request_request(request_id), timeout)

    async def get_load(self, *, timeout: float | None = None) -> Load:
        """Return how busy the cell is and who holds the KV blocks."""
        request = request_convert.get_load_request()
        return response_convert.load_from(await self._connection.unary(GET_LOAD, request, timeout))

    async def get_kv_state(
        self,
        executor: str | None = None,
        *,
        limit: int = 100,
        block_ids: bool = False,
        map_cells: int = 0,
        timeout: float | None = None,
    ) -> KvState:
        """Return who holds which KV blocks, at one executor or at all, and why those that wait do.

        `limit`: most sequences; a thousand are of one moment with the rest, further ones of later moments. `block_ids`
        tells each one's blocks, `map_cells`, up to 4096, draws each executor's. `timeout`: seconds for each page of a
        thousand sequences. Raises NotFoundError where the executor has no session.
        """
        pages: list[admin_pb2.GetKvStateResponse] = []
        while (request := kv_convert.kv_state_request(pages, executor, limit, block_ids, map_cells)) is not None:
            pages.append(await self._connection.unary(GET_KV_STATE, request, timeout))
        return kv_convert.kv_state_from(pages, limit)

    async def flush_prefix_cache(self, executor: str | None = None, *, timeout: float | None = None) -> int:
        """Forget what the prefix cache of one executor holds, or of all; return how many blocks became free.

        Who comes next computes its whole prompt; who runs keeps its blocks. Raises NotFoundError where the executor
        has no session.
        """
        request = kv_convert.flush_prefix_cache_request(executor)
        return (await self._connection.unary(FLUSH_PREFIX_CACHE, request, timeout)).freed_blocks

    async def drain(
        self,
        *,
        gateway: str | None = None,
        executor: str | None = None,
        scheduler: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Have one service stop in order, as SIGTERM does: exactly one of the three is to be given.

        `gateway`: the part of its requests' ids before the hyphen, or "self" for the one that is asked; `executor`: its
        address, as get_load gives it. Raises NotFoundError where it is not there.
        """
        request = request_convert.drain_request(gateway, executor, scheduler=scheduler)
        await self._connection.unary(DRAIN, request, timeout)
