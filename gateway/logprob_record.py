"""Logprobs of tokens in flat arrays that grow: of a choice's output, and of a request's prompt."""

from __future__ import annotations

from gateway.requests import LogprobColumns
from octavo.rpc.logprobs import unpack_floats


class RecordError(Exception):
    """The scheduler sent what cannot follow from the record: a bug on one of the two sides."""


class LogprobRecord:
    """Logprobs of a run of tokens; `num_top` alternatives a token."""

    def __init__(self, num_top: int) -> None:
        self.num_top = num_top
        self._sampled = bytearray()
        self._top_token_ids = bytearray()
        self._top_logprobs = bytearray()

    def __len__(self) -> int:
        return len(self._sampled) // 4

    def append(self, columns: LogprobColumns | None, num_tokens: int, skip: int) -> None:
        """Append those of `num_tokens` tokens, less the first `skip`. Raises RecordError where the sizes do not fit."""
        if columns is None:
            raise RecordError("tokens came without the logprobs that were asked for")
        top_bytes = 4 * num_tokens * self.num_top
        sizes = (columns.num_top, len(columns.sampled), len(columns.top_token_ids), len(columns.top_logprobs))
        if sizes != (self.num_top, 4 * num_tokens, top_bytes, top_bytes):
            raise RecordError(f"logprobs of {num_tokens} tokens with {self.num_top} alternatives have sizes {sizes}")
        self._sampled += columns.sampled[4 * skip :]
        self._top_token_ids += columns.top_token_ids[4 * skip * self.num_top :]
        self._top_logprobs += columns.top_logprobs[4 * skip * self.num_top :]

    def keep(self, num_tokens: int) -> None:
        """Forget those of the tokens past the first `num_tokens`."""
        del self._sampled[4 * num_tokens :]
        del self._top_token_ids[4 * num_tokens * self.num_top :]
        del self._top_logprobs[4 * num_tokens * self.num_top :]

    def slice(self, start: int, stop: int) -> LogprobColumns:
        """Return those of tokens `start` to `stop`."""
        top = slice(4 * start * self.num_top, 4 * stop * self.num_top)
        return LogprobColumns(
            self.num_top,
            bytes(self._sampled[4 * start : 4 * stop]),
            bytes(self._top_token_ids[top]),
            bytes(self._top_logprobs[top]),
        )

    def sampled(self) -> tuple[float, ...]:
        """Return the logprob of each token."""
        return unpack_floats(bytes(self._sampled))


class PromptLogprobRecord:
    """Logprobs of a prompt's tokens from one on, at the earliest the second. They come in runs, some again."""

    def __init__(self, num_top: int, num_prompt_tokens: int, first_token_index: int = 1) -> None:
        self._record = LogprobRecord(num_top)
        self._start = first_token_index
        self._num_told = num_prompt_tokens - first_token_index

    def __len__(self) -> int:
        return len(self._record)

    @property
    def is_complete(self) -> bool:
        """All are there."""
        return len(self._record) == self._num_told

    @property
    def num_top(self) -> int:
        """Alternatives a token."""
        return self._record.num_top

    def apply(self, first_token_index: int, columns: LogprobColumns) -> bool:
        """Append what is new of a run from token `first_token_index` of the prompt on; return whether anything was.

        A stay that begins anew tells the same again: it is dropped. Raises RecordError on a gap, and on what lies
        outside the prompt.
        """
        first, count, known = first_token_index - self._start, len(columns.sampled) // 4, len(self._record)
        if first < 0 or first + count > self._num_told:
            raise RecordError(f"logprobs of {count} tokens from {first_token_index} on are not those asked for")
        if first > known:
            raise RecordError(f"a gap: prompt logprobs from token {first_token_index} on, where {known} are known")
        skip = min(known - first, count)
        self._record.append(columns, count, skip)
        return skip < count

    def slice(self, start: int, stop: int) -> LogprobColumns:
        """Return those of the prompt's tokens `start` to `stop`, none before the first that is told of."""
        return self._record.slice(start - self._start, stop - self._start)

    def logprobs(self) -> tuple[float, ...]:
        """Return the logprob of each token from the first that is told of on."""
        return self._record.sampled()
