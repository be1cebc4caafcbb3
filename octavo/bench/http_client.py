"""An OpenAI-compatible HTTP server as a target: /completions or /chat/completions, streamed as server-sent events."""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import Sequence
from typing import Any

import httpx

from octavo.bench.records import BenchError, BenchRequest, Record, RequestFailed
from octavo.bench.sse import SseReader
from octavo.bench.target import Clock, GenerationOptions, TargetInfo

_ASK_SECONDS = 60.0
_MOST_MESSAGE_CHARACTERS = 300


class HttpTarget:
    """One server. Every live request has a connection of its own; connections are used again."""

    def __init__(self, url: str, options: GenerationOptions, clock: Clock, *, api_key: str = "") -> None:
        """`url` is the base, http://host:port/v1. Make it on the event loop. Raises BenchError: no URL, no key."""
        self._url = url.rstrip("/")
        self._options = options
        self._clock = clock
        self._model = options.model
        try:
            host = httpx.URL(self._url).host
        except httpx.InvalidURL as error:
            raise BenchError(f"--url: {url!r} is no URL ({error}): give http://host:port/v1") from None
        if not host or not self._url.startswith(("http://", "https://")):
            raise BenchError(f"--url: {url!r} is no HTTP address: give http://host:port/v1")
        # Compressed events would be held back until a block is full.
        headers = {"accept-encoding": "identity", "content-type": "application/json"}
        if api_key:
            if not (api_key.isascii() and api_key.isprintable()):
                raise BenchError("--api-key, OPENAI_API_KEY: must be printable ASCII, as all that is sent in a header")
            headers["authorization"] = f"Bearer {api_key}"
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=None,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            # A proxy that the environment names is right for the world and wrong for this machine.
            trust_env=not _is_loopback(host),
        )

    async def describe(self) -> TargetInfo:
        """Return the model. Raises BenchError where the server is not there, or has several and none was named."""
        max_model_len = 0
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                response = await self._client.get(f"{self._url}/models")
            listed = response.json()["data"] if response.is_success else []
            models = {str(each["id"]): each for each in listed}
        except (httpx.HTTPError, TimeoutError) as error:
            raise BenchError(f"--url: {self._url} does not answer ({_words(error)})") from None
        except (ValueError, KeyError, TypeError):
            models = {}
        if not self._model:
            if len(models) != 1:
                found = f"lists {', '.join(models)}" if models else f"lists no model (HTTP {response.status_code})"
                advice = "name the one to measure"
                if not models and not self._url.endswith("/v1"):
                    advice += f", or --url {self._url}/v1, where an OpenAI API has them"
                raise BenchError(f"--model: {self._url} {found}; {advice}")
            self._model = next(iter(models))
        described = models.get(self._model, {})
        if isinstance(described.get("max_model_len"), int):
            max_model_len = described["max_model_len"]
        api = "chat" if self._options.is_chat else "completions"
        return TargetInfo("http", self._url, api, self._model, max_model_len=max_model_len)

    async def encode(self, text: str) -> Sequence[int] | None:  # noqa: ARG002 - the interface's
        """Return None: OpenAI's API has no tokenizer."""
        return None

    async def count_tokens(self, text: str) -> int | None:
        """Return the server's count for a request of one output token."""
        body = self._body(BenchRequest(text, 1)) | {"stream": False}
        del body["stream_options"]
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                response = await self._client.post(self._path(), content=json.dumps(body))
        except (httpx.HTTPError, TimeoutError) as error:
            raise BenchError(f"--url: {self._url} does not answer ({_words(error)})") from None
        if not response.is_success:
            failure = _http_failure(response.status_code, response.content)
            raise BenchError(f"{self._url} refuses a request: {failure.status}: {failure.message}")
        try:
            return int(response.json()["usage"]["prompt_tokens"])
        except (ValueError, KeyError, TypeError):
            return None

    async def stream(self, request: BenchRequest, record: Record) -> None:
        """Generate. Raises RequestFailed: HTTP_code, STREAM_ERROR, BROKEN_STREAM, CONNECT, TIMEOUT."""
        content = json.dumps(self._body(request))
        try:
            async with (
                asyncio.timeout(self._options.timeout),
                self._client.stream("POST", self._path(), content=content) as response,
            ):
                await self._read(response, record)
        except TimeoutError:
            raise RequestFailed("TIMEOUT", f"not finished after {self._options.timeout:g} s (--timeout)") from None
        except httpx.ConnectError as error:
            raise RequestFailed("CONNECT", _words(error)) from None
        except httpx.HTTPError as error:
            raise RequestFailed("BROKEN_STREAM", _words(error)) from None
        finally:
            if not record.is_counted_by_server:
                record.output_tokens = sum(record.delta_tokens)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _read(self, response: httpx.Response, record: Record) -> None:
        if not response.is_success:
            raise _http_failure(response.status_code, await response.aread())
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            raise RequestFailed("NOT_STREAMED", "the server answered without streaming")
        reader = SseReader()
        is_whole = False
        async for chunk in response.aiter_raw():
            now = self._clock()
            for payload in reader.feed(chunk):
                is_whole = _note(payload, now, record) or is_whole
        if not is_whole:
            raise RequestFailed("BROKEN_STREAM", "the stream ended without [DONE] or a finish_reason")

    def _path(self) -> str:
        return f"{self._url}/{'chat/completions' if self._options.is_chat else 'completions'}"

    def _body(self, request: BenchRequest) -> dict[str, Any]:
        options = self._options
        prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.ignore_eos:
            # Not OpenAI's own, but vLLM, SGLang, TensorRT-LLM and llama.cpp know it.
            body["ignore_eos"] = True
        if options.is_chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        return body


def _note(payload: bytes, now: float, record: Record) -> bool:
    """Note one event in the record; return whether it ends the output. Raises RequestFailed."""
    if payload == b"[DONE]":
        return True
    try:
        event = json.loads(payload)
        if "error" in event or event.get("object") == "error":
            raise RequestFailed("STREAM_ERROR", _error_words(event))
        is_end = False
        for choice in event.get("choices") or ():
            if num_tokens := _num_tokens(choice):
                record.stamps.append(now)
                record.delta_tokens.append(num_tokens)
            is_end = is_end or choice.get("finish_reason") is not None
        if usage := event.get("usage"):
            record.prompt_tokens = int(usage["prompt_tokens"])
            record.output_tokens = int(usage["completion_tokens"])
            record.is_counted_by_server = True
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RequestFailed("BROKEN_STREAM", f"an event that cannot be read: {payload[:80]!r}") from None
    return is_end


def _num_tokens(choice: dict[str, Any]) -> int:
    """Return the tokens that an event brings: of its ids where it has them, else 1 where it has any text.

    The first event of a chat has a role and no text: no token has come with it.
    """
    if token_ids := choice.get("token_ids"):
        return len(token_ids)
    if choice.get("text"):
        return 1
    delta = choice.get("delta") or {}
    return int(any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls")))


def _http_failure(status_code: int, body: bytes) -> RequestFailed:
    try:
        message = _error_words(json.loads(body))
    except (ValueError, AttributeError, TypeError):
        message = body.decode(errors="replace")
    return RequestFailed(f"HTTP_{status_code}", message[:_MOST_MESSAGE_CHARACTERS])


def _error_words(body: dict[str, Any]) -> str:
    """Return what an error in OpenAI's shape says: {"error": {"message", "type", "code"}}, or flat."""
    error = body.get("error", body)
    if not isinstance(error, dict):
        return str(error)
    kind = error.get("code") or error.get("type")
    message = str(error.get("message", ""))
    return f"{kind}: {message}" if kind else message


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
