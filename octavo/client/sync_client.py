"""Clients for code that blocks."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self, Unpack

from octavo.client import kv_convert, request_convert, response_convert
from octavo.client.admin_types import Load, RequestInfo
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
from octavo.client.sync_connection import SyncConnection
from octavo.client.sync_stream import GenerateStream
from octavo.client.types import Completion, GenerateOptions, Messages, Model, Prompt, Scores, TokenCount
from octavo.v1 import admin_pb2


class _SyncClient:
    """What both clients are: an owner of one connection."""

    def __init__(self, api: Api, address: str | Sequence[str] | None, api_key: str | None = None) -> None:
        self._connection = SyncConnection(api, address, api_key)

    @property
    def address(self) -> str | None:
        """Where the gateway is, host:port; None until it has been looked for."""
        return self._connection.address

    def close(self) -> None:
        """Close the connection. Requests under way are cancelled; their readers get RequestCancelledError."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Client(_SyncClient):
    """A blocking client of a gateway.

        with octavo.Client() as client:
            for delta in client.generate("Once upon a time", max_tokens=64):
                print(delta.text, end="")

    `address` is host:port, or a list of them, gateways of one cell: where one is lost the next is asked, and streams
    are taken up there. None: OCTAVO_ADDRESS (host:port, or several with commas between), else the first gateway that
    answers on 127.0.0.1, at 50051 or in the range that docker-compose.yml publishes; it is looked for on first use.
    `api_key` is for a gateway that wants one; None: OCTAVO_API_KEY, where it is set.

    One client serves any number of threads over one connection. Make it after a fork, not before: a connection does
    not survive one (multiprocessing: use the start methods spawn or forkserver, or make a client in each process).

    Every call raises a ServiceError of the class that its status code has (octavo.client.errors), and takes a `timeout`
    in seconds for the whole of it. Refused calls are sent again by gRPC where the gateway was not reached or could not
    take them at the moment (UNAVAILABLE), up to five times within about 1.5 s, and never once output may exist.
    """

    def __init__(self, address: str | Sequence[str] | None = None, *, api_key: str | None = None) -> None:
        super().__init__(GATEWAY, address, api_key if api_key is not None else given_api_key())

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> GenerateStream:
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
        return GenerateStream(connection, point, timeout)

    def complete(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Return all that the model writes after `prompt`, once it is complete."""
        request = request_convert.generate_once_request(prompt, options)
        return response_convert.completion_from(self._connection.unary(GENERATE_ONCE, request, timeout))

    def score(
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
        return response_convert.scores_from(self._connection.unary(SCORE, request, timeout))

    def count_tokens(
        self, prompt: str | Messages, *, model: str | None = None, timeout: float | None = None
    ) -> TokenCount:
        """Return how many tokens an input has, and how many input and output may have together."""
        request = request_convert.count_tokens_request(prompt, model)
        return response_convert.token_count_from(self._connection.unary(COUNT_TOKENS, request, timeout))

    def tokenize(
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
        return list(self._connection.unary(TOKENIZE, request, timeout).token_ids)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str | None = None,
        skip_special_tokens: bool | None = None,
        timeout: float | None = None,
    ) -> str:
        """Return the text of token ids. `skip_special_tokens`: False writes special tokens out."""
        request = request_convert.detokenize_request(token_ids, model, skip_special_tokens)
        return self._connection.unary(DETOKENIZE, request, timeout).text

    def list_models(self, *, timeout: float | None = None) -> list[Model]:
        """Return the served models, by name. `timeout`: seconds for each page of a hundred."""
        models: list[Model] = []
        token = ""
        while True:
            page = self._connection.unary(LIST_MODELS, request_convert.list_models_request(token), timeout)
            models += map(response_convert.model_from, page.models)
            token = page.next_page_token
            if not token:
                return models

    def get_model(self, name: str, *, timeout: float | None = None) -> Model:
        """Return the description of a model. Raises NotFoundError."""
        request = request_convert.get_model_request(name)
        return response_convert.model_from(self._connection.unary(GET_MODEL, request, timeout).model)


class AdminClient(_SyncClient):
    """A blocking client of the operator's API, which every gateway serves on a port of its own for the whole cell.

    `address` is host:port. None: OCTAVO_ADMIN_ADDRESS, else the first admin port that answers on 127.0.0.1, at 50054 or
    in the range that docker-compose.yml publishes. Threads, forks, errors and retries as for Client; cancel_request is
    sent once.
    """

    def __init__(self, address: str | Sequence[str] | None = None) -> None:
        super().__init__(ADMIN, address)

    def list_requests(self, *, timeout: float | None = None) -> list[RequestInfo]:
        """Return the live requests, oldest first. `timeout`: seconds for each page of a thousand."""
        infos: list[RequestInfo] = []
        token = ""
        while True:
            page = self._connection.unary(LIST_REQUESTS, request_convert.list_requests_request(token), timeout)
            infos += map(response_convert.request_info_from, page.requests)
            token = page.next_page_token
            if not token:
                return infos

    def cancel_request(self, request_id: str, *, timeout: float | None = None) -> None:
        """End a live request by the gateway's id of it. Raises NotFoundError where it is not live."""
        self._connection.unary(CANCEL_REQUEST, request_convert.cancel_request_request(request_id), timeout)

    def get_load(self, *, timeout: float | None = None) -> Load:
        """Return how busy the cell is and who holds the KV blocks."""
        request = request_convert.get_load_request()
        return response_convert.load_from(self._connection.unary(GET_LOAD, request, timeout))

    def get_kv_state(
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
            pages.append(self._connection.unary(GET_KV_STATE, request, timeout))
        return kv_convert.kv_state_from(pages, limit)

    def flush_prefix_cache(self, executor: str | None = None, *, timeout: float | None = None) -> int:
        """Forget what the prefix cache of one executor holds, or of all; return how many blocks became free.

        Who comes next computes its whole prompt; who runs keeps its blocks. Raises NotFoundError where the executor
        has no session.
        """
        request = kv_convert.flush_prefix_cache_request(executor)
        return (self._connection.unary(FLUSH_PREFIX_CACHE, request, timeout)).freed_blocks

    def drain(
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
        self._connection.unary(DRAIN, request, timeout)
