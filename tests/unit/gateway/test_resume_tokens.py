"""Resume tokens: who may take a stream up, and for how long."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.resume_tokens import LIFE, ResumeTokens
from octavo.rpc.errors import ServiceError

KEY = "0123456789abcdef"
ID = ("ab" * 16, 7)


class WallClock:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def test_gateways_with_one_key_honour_one_another() -> None:
    """A token of one is read by the other: the id and nothing else is in it that matters."""
    token = ResumeTokens(KEY, "blue").make(ID, "alice")
    assert ResumeTokens(KEY, "blue").open(token, "alice", "resume.token") == ID


@pytest.mark.parametrize(
    ("key", "cell", "tenant", "code"),
    [
        ("another key 0123", "blue", "alice", grpc.StatusCode.INVALID_ARGUMENT),
        (None, "blue", "alice", grpc.StatusCode.INVALID_ARGUMENT),
        (KEY, "green", "alice", grpc.StatusCode.INVALID_ARGUMENT),
        (KEY, "blue", "bob", grpc.StatusCode.PERMISSION_DENIED),
    ],
)
def test_nobody_else_can_use_it(key: str | None, cell: str, tenant: str, code: grpc.StatusCode) -> None:
    """Not under another key, in another cell, or by another tenant; the error names the field."""
    token = ResumeTokens(KEY, "blue").make(ID, "alice")
    with pytest.raises(ServiceError) as raised:
        ResumeTokens(key, cell).open(token, tenant, "resume.token")
    assert raised.value.code is code
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        assert [each.field for each in raised.value.violations] == ["resume.token"]


def test_a_token_expires() -> None:
    """It is good until its time is over, and NOT_FOUND from then on."""
    clock = WallClock()
    tokens = ResumeTokens(KEY, "blue", clock)
    token = tokens.make(ID, "alice")
    clock.now += LIFE - 1
    assert tokens.open(token, "alice", "t") == ID
    clock.now += 1
    with pytest.raises(ServiceError) as raised:
        tokens.open(token, "alice", "t")
    assert (raised.value.code, raised.value.reason) == (grpc.StatusCode.NOT_FOUND, "NOTHING_TO_RESUME")


@given(st.text(max_size=200))
def test_garbage_is_refused(text: str) -> None:
    """Whatever is sent as a token is INVALID_ARGUMENT, never an error of ours."""
    with pytest.raises(ServiceError) as raised:
        ResumeTokens(KEY, "blue").open(text, "alice", "t")
    assert raised.value.code is grpc.StatusCode.INVALID_ARGUMENT


@given(st.integers(0, 10_000), st.characters(codec="ascii"))
def test_a_changed_token_is_refused(place: int, character: str) -> None:
    """One character changed anywhere is another token, or the same bytes written otherwise."""
    tokens = ResumeTokens(KEY, "blue")
    token = tokens.make(ID, "alice")
    place %= len(token)
    changed = token[:place] + character + token[place + 1 :]
    try:
        assert tokens.open(changed, "alice", "t") == ID
        assert character == token[place] or place in (len(token) - 1, token.index(".") - 1)
    except ServiceError as error:
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT  # noqa: PT017 - either way is right
