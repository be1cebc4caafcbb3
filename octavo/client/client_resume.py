"""How a stream goes on where it was lost: what to ask then, whom, and for how long."""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc

from octavo.client.client_rpcs import grpc_timeout
from octavo.client.errors import is_of_transport
from octavo.client.patience import PATIENCE, Patience, growing_pause
from octavo.client.types import ChoiceFinished, Delta, PromptTokens, Started, Usage
from octavo.rpc.errors import ServiceError
from octavo.v1 import inference_pb2

RESUME_GRACE = 30.0
"""Seconds that a request outlives its stream, where the caller does not say."""

SETTLING = 5.0
"""Seconds for which a cell that does not know a request is asked again: gateways may be telling a new scheduler.

Then it was lost with all its holders, and is run again from its beginning: what its caller has had is compared with
what comes, and not told twice.
"""

NOTHING_TO_RESUME = "NOTHING_TO_RESUME"

Event = Started | PromptTokens | Delta | ChoiceFinished | Usage


def ask_for_grace(request: inference_pb2.GenerateRequest) -> None:
    """Have a request outlive its stream, unless its caller has said how long, or it cannot."""
    if not (request.HasField("resume_grace") or request.output.HasField("prompt_logprobs")):
        request.resume_grace.FromNanoseconds(round(RESUME_GRACE * 1e9))


class ResumePoint:
    """One request as it is read. Times are seconds on `clock`."""

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        timeout: float | None,
        num_addresses: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        is_known: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_known`: the cell has answered before. Raises TypeError, and InvalidArgumentError for a timeout of NaN."""
        self._first_request = request
        grace = request.resume_grace.ToNanoseconds() / 1e9 if request.HasField("resume_grace") else PATIENCE
        self._patience = Patience(grace, num_addresses, is_known, clock)
        self._grace = request.resume_grace.ToNanoseconds() / 1e9
        self._num_addresses = num_addresses
        self._clock = clock
        seconds = grpc_timeout(timeout)
        self._deadline = None if seconds is None else clock() + seconds
        # What the streams have told of the request that is read: tokens and bytes of text, by choice.
        self._positions: dict[int, tuple[int, int]] = {}
        # What the caller has had, which is more while a request that was lost is run again.
        self._had: dict[int, tuple[list[int], int]] = {}
        self._num_prompt_tokens_had = 0
        self._num_prompt_tokens = 0
        self._seed: int | None = None
        self._has_begun = False
        self._is_replaying = False
        self._num_tries = 0
        self._lost_at: float | None = None
        self._unknown_since: float | None = None
        self.token = ""

    def request(self) -> inference_pb2.GenerateRequest:
        """Return what to ask now: the request itself, or the rest of it."""
        if not self.token:
            return self._first_request
        request = inference_pb2.GenerateRequest(request_id=self._first_request.request_id)
        request.resume.token = self.token
        for choice, (num_tokens, text_bytes) in self._positions.items():
            request.resume.positions.add(choice=choice, num_tokens=num_tokens, text_bytes=text_bytes)
        return request

    def cancel_request(self) -> inference_pb2.CancelGenerateRequest:
        """Return what ends the request, whoever reads it."""
        return inference_pb2.CancelGenerateRequest(resume_token=self.token)

    def timeout(self) -> float | None:
        """Return the seconds that are left for all of it."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def take(self, event: Event | None) -> Event | None:
        """Note what was read; return what of it the caller has not had, None for nothing.

        Raises ServiceError (ABORTED, OUTPUT_CHANGED) where a request that was run again writes something else.
        """
        self._has_begun = True
        if isinstance(event, Started):
            self.token = event.resume_token
            self._seed = event.seed
            self._num_prompt_tokens = 0
        elif isinstance(event, PromptTokens):
            # Pieces of an echo end at the same places each time.
            self._num_prompt_tokens += len(event.token_ids)
            if self._num_prompt_tokens <= self._num_prompt_tokens_had:
                return None
            self._num_prompt_tokens_had = self._num_prompt_tokens
        elif isinstance(event, Delta):
            self._lost_at = self._unknown_since = None
            self._num_tries = 0
            return self._new_part(event)
        return event

    def _new_part(self, delta: Delta) -> Delta | None:
        choice, end = delta.choice, delta.first_token_index + len(delta.token_ids)
        text = delta.text.encode()
        text_end = self._positions.get(choice, (0, 0))[1] + len(text)
        self._positions[choice] = end, text_end
        tokens, num_bytes = self._had.setdefault(choice, ([], 0))
        num_had = len(tokens)
        skip = min(max(0, num_had - delta.first_token_index), len(delta.token_ids))
        if skip and list(delta.token_ids[:skip]) != tokens[delta.first_token_index : delta.first_token_index + skip]:
            message = (
                "the request was lost and run again, and its output is another: the model's results depend on the batch"
            )
            raise ServiceError(grpc.StatusCode.ABORTED, "OUTPUT_CHANGED", message)
        tokens.extend(delta.token_ids[skip:])
        self._had[choice] = tokens, max(num_bytes, text_end)
        if not skip and text_end - len(text) >= num_bytes:
            return delta
        new_text = text[min(len(text), max(0, num_bytes - (text_end - len(text)))) :].decode()
        if skip == len(delta.token_ids) and not new_text:
            return None
        first = delta.first_token_index + skip
        return Delta(choice, first, new_text, delta.token_ids[skip:], delta.logprobs[skip:])

    def _run_again(self) -> None:
        """Ask for the same request from its beginning: with the same seed it writes the same."""
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self._first_request)
        assert self._seed is not None, "a request with a token has started"
        request.seed = self._seed
        self._first_request = request
        self._positions = {}
        self._is_replaying = True
        self.token = ""

    def pause_after(self, error: ServiceError) -> float | None:
        """Return the seconds to wait before another try at the next address; None: it is no use."""
        if not self.token and not self._is_replaying:
            # Nothing has begun, or nothing that could be found again.
            return None if self._has_begun else self._patience.pause_after(error)
        now = self._clock()
        self._num_tries += 1
        if self._lost_at is None:
            self._lost_at = now
        if error.reason == NOTHING_TO_RESUME:
            self._unknown_since = now if self._unknown_since is None else self._unknown_since
            if now - self._unknown_since > SETTLING:
                self._unknown_since = None
                self._run_again()
        elif not _is_lost(error) or now - self._lost_at > self._grace:
            return None
        if self._num_tries == 1 and self._num_addresses() > 1:
            return 0.0
        return growing_pause(self._num_tries)


def _is_lost(error: ServiceError) -> bool:
    """Tell whether a call ended because nobody was there any more, and not by anybody's decision about the request."""
    return error.code is grpc.StatusCode.UNAVAILABLE or is_of_transport(error)
