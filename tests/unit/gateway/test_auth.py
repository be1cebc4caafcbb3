"""API keys: the file, the check, and every public rpc behind it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cell_of_tests import CELL
from gateway_fakes import TIMEOUT, Stack, running_stack
from grpc_health.v1 import health_pb2

from gateway.auth import ApiKeys, ApiKeysError, read_api_keys
from gateway.resume_tokens import ResumeTokens
from octavo.models.prepared import PreparedModel
from octavo.rpc.errors import ServiceError, from_rpc_error
from octavo.v1 import inference_pb2, model_pb2

KEY, OTHER_KEY = "sk-0123456789", "sk-abcdefghij"
RESUME_KEY = "r" * 16
TOKEN = ResumeTokens(RESUME_KEY, CELL).make(("ab" * 16, 1), "alice")
FILE = f"""# who may call
alice {KEY}

bob\t{OTHER_KEY}
   # alice has a second one
alice sk-second-key
"""


def write(folder: Path, text: str) -> Path:
    """Write a file of keys."""
    file = folder / "keys"
    file.write_text(text, encoding="utf-8")
    return file


def test_keys_have_tenants(tmp_path: Path) -> None:
    """Each key of the file is its tenant's; the scheme's case and spaces around the key do not matter."""
    keys = read_api_keys(write(tmp_path, FILE))
    assert keys.tenant_of(f"Bearer {KEY}") == keys.tenant_of("bearer sk-second-key") == "alice"
    assert keys.tenant_of(f"BEARER   {OTHER_KEY} ") == "bob"


@pytest.mark.parametrize(
    ("authorization", "reason"),
    [
        (None, "MISSING_API_KEY"),
        ("", "MISSING_API_KEY"),
        ("Bearer", "INVALID_API_KEY"),
        ("Bearer ", "INVALID_API_KEY"),
        (KEY, "INVALID_API_KEY"),
        (f"Basic {KEY}", "INVALID_API_KEY"),
        (f"Bearer {KEY}x", "INVALID_API_KEY"),
        (f"Bearer {KEY[:-1]}", "INVALID_API_KEY"),
        ("Bearer \udcff\u00e9", "INVALID_API_KEY"),
    ],
)
def test_what_is_no_key(tmp_path: Path, authorization: str | None, reason: str) -> None:
    """Without a key, with one that is not in the file, or in another form: UNAUTHENTICATED, and the key is not said."""
    keys = read_api_keys(write(tmp_path, FILE))
    with pytest.raises(ServiceError) as raised:
        keys.tenant_of(authorization)
    assert (raised.value.code, raised.value.reason) == (grpc.StatusCode.UNAUTHENTICATED, reason)
    assert KEY[:-1] not in raised.value.message


def test_without_a_file_everybody_is_the_default_tenant() -> None:
    """No keys: nobody needs one, and a client that sends one anyway is served."""
    assert ApiKeys(None).tenant_of(None) == ApiKeys(None).tenant_of("Bearer whatever") == "default"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no keys"),
        ("# nothing\n\n", "has no keys"),
        (f"alice {KEY}\n{OTHER_KEY}\n", "line 2: must be a tenant and a key, .*, has 1 word$"),
        (f"\nalice {KEY} more\n", "line 2: must be a tenant and a key, .*, has 3 words$"),
        (f"alice {KEY}\nbob {KEY}\n", "line 2: the key is that of line 1"),
        ("alice 1234567", "line 1: a key has at least 8"),
        ("alice pässwörter", "line 1: a key has at least 8"),
        (f"{'a' * 65} {KEY}", "line 1: a tenant has at most 64"),
    ],
)
def test_a_file_that_is_no_good(tmp_path: Path, text: str, words: str) -> None:
    """What is wrong is named with file and line, and no key is printed."""
    file = write(tmp_path, text)
    with pytest.raises(ApiKeysError, match=words) as raised:
        read_api_keys(file)
    message = str(raised.value)
    assert str(file) in message
    assert not any(key in message for key in (KEY, OTHER_KEY, "1234567", "pässwörter"))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file, and one that is no text, are named."""
    with pytest.raises(ApiKeysError, match="cannot be read"):
        read_api_keys(tmp_path / "none")
    file = tmp_path / "bytes"
    file.write_bytes(b"alice \xff\xfe\n")
    with pytest.raises(ApiKeysError, match="UTF-8"):
        read_api_keys(file)


def test_keys_do_not_show() -> None:
    """Nothing that prints an object of keys shows one: only hashes are kept."""
    keys = ApiKeys({KEY: "alice"})
    assert KEY not in repr(keys) + repr(vars(keys))


def rpcs_of(stack: Stack) -> dict[str, tuple[Any, Any]]:
    """Return every public rpc with a request that is fine."""
    generate = inference_pb2.GenerateRequest(text="a")
    part = inference_pb2.Continuation(text="b")
    return {
        "Generate": (stack.inference.Generate, generate),
        "CancelGenerate": (stack.inference.CancelGenerate, inference_pb2.CancelGenerateRequest(resume_token=TOKEN)),
        "GenerateOnce": (stack.inference.GenerateOnce, inference_pb2.GenerateOnceRequest(request=generate)),
        "Score": (stack.inference.Score, inference_pb2.ScoreRequest(text="a", continuations=[part])),
        "Tokenize": (stack.inference.Tokenize, inference_pb2.TokenizeRequest(text="a")),
        "Detokenize": (stack.inference.Detokenize, inference_pb2.DetokenizeRequest(token_ids=[5])),
        "CountTokens": (stack.inference.CountTokens, inference_pb2.CountTokensRequest(text="a")),
        "ListModels": (stack.models.ListModels, model_pb2.ListModelsRequest()),
        "GetModel": (stack.models.GetModel, model_pb2.GetModelRequest(name="tiny")),
    }


async def finish(call: Any) -> None:
    """Read a call of either shape to its end."""
    if isinstance(call, grpc.aio.UnaryStreamCall):
        async for _ in call:
            pass
    else:
        await call


def test_every_public_rpc_is_among_them() -> None:
    """A new rpc of the public services must be added to these tests."""
    services = [
        inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
        model_pb2.DESCRIPTOR.services_by_name["ModelService"],
    ]
    names = {method.name for service in services for method in service.methods}
    assert names == {
        "Generate", "GenerateOnce", "CancelGenerate", "Score", "Tokenize", "Detokenize", "CountTokens", "ListModels",
        "GetModel",
    }  # fmt: skip


@pytest.mark.asyncio
async def test_every_public_rpc_needs_a_key(
    prepared: PreparedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a file every rpc refuses calls without a good key and serves the others; health is open; no log has it."""
    caplog.set_level(logging.DEBUG)
    async with running_stack(prepared, api_keys=str(write(tmp_path, FILE)), resume_key=RESUME_KEY) as stack:
        bad_metadata: list[tuple[tuple[str, str], ...]] = [(), (("authorization", f"Bearer {KEY}nope"),)]
        for name, (method, request) in rpcs_of(stack).items():
            for metadata in bad_metadata:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await finish(method(request, metadata=metadata, timeout=TIMEOUT))
                error = from_rpc_error(raised.value)
                assert error.code is grpc.StatusCode.UNAUTHENTICATED, name
                assert error.reason == ("INVALID_API_KEY" if metadata else "MISSING_API_KEY")
            await finish(method(request, metadata=(("authorization", f"Bearer {KEY}"),), timeout=TIMEOUT))
        await stack.health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT)
        assert {submit.tenant for submit in stack.scheduler.of_kind("submit")} == {"alice"}
    assert KEY not in caplog.text


@pytest.mark.asyncio
async def test_tenants_side_by_side(prepared: PreparedModel, tmp_path: Path) -> None:
    """Requests of two tenants at once reach the scheduler each under its own."""
    async with running_stack(prepared, api_keys=str(write(tmp_path, FILE))) as stack:
        calls = [
            finish(
                stack.inference.Generate(
                    inference_pb2.GenerateRequest(text="a", request_id=tenant),
                    metadata=(("authorization", f"Bearer {key}"),),
                    timeout=TIMEOUT,
                )
            )
            for tenant, key in (("alice", KEY), ("bob", OTHER_KEY))
            for _ in range(3)
        ]
        await asyncio.gather(*calls)
        submits = stack.scheduler.of_kind("submit")
        assert len(submits) == 6
        assert all(submit.tenant == submit.label for submit in submits)
