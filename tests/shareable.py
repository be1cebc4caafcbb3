"""A model of the prefix cache: whatever may be taken from it, by a plain reading of its contract."""

from __future__ import annotations

from fakes import FakeGateway

from scheduler_svc.batch import BatchResult, NewSequence, RowStatus, ScheduledBatch, ScheduledRow
from scheduler_svc.request_record import RequestRecord


class Shareable:
    """By session: the tokens whose KV good rows have computed, and who may share it.

    Says nothing of what is evicted, so that a hit on what is not here is a fault, and a miss never is.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], tuple[ScheduledRow, ...]] = {}
        self._stays: dict[tuple[int, int], tuple[RequestRecord, int]] = {}
        self._prefixes: set[tuple[int, str, str, tuple[int, ...]]] = set()

    def check_admission(self, session: int, new: NewSequence, record: RequestRecord) -> None:
        """Note a stay. Raises AssertionError where it took what it may not have, or what is not there."""
        self._stays[session, new.handle] = record, new.choice
        if new.num_cached_tokens:
            assert record.reads_cache, "it took cached blocks although it was not to"
            most = record.max_cached_tokens
            assert most is None or new.num_cached_tokens <= most, "it took more of the cache than it was to"
            prefix = new.token_ids[: new.num_cached_tokens]
            assert (session, record.tenant, record.cache_salt, prefix) in self._prefixes, "a hit on what is not there"

    def sent(self, session: int, batch: ScheduledBatch) -> None:
        """Note the rows of a step."""
        self._rows[session, batch.step] = batch.rows

    def note(self, session: int, block_size: int, result: BatchResult, gateway: FakeGateway) -> None:
        """Note what can be shared from now on: what good rows of those that may leave blocks have computed."""
        rows = self._rows.pop((session, result.step))
        for row, answer in zip(rows, result.rows, strict=result.failure is None):
            record, choice = self._stays[session, row.handle]
            if answer.status is RowStatus.OK and record.writes_cache:
                tokens = (*record.prompt_token_ids, *gateway.tokens[record.id, choice])
                num_computed = row.num_computed_tokens + row.num_scheduled_tokens
                for end in range(block_size, num_computed + 1, block_size):
                    self._prefixes.add((session, record.tenant, record.cache_salt, tokens[:end]))

    def clear(self) -> None:
        """Forget everything: the cache was flushed."""
        self._prefixes.clear()
