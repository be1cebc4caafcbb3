"""The text of one choice, from its tokens to what its client is shown."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.detokenizer import Detokenizer
from gateway.requests import ChoiceEnd, FinishReason
from gateway.stop_matcher import StopMatcher


class OutputText:
    """Detokenizes, looks for stop strings, leaves out the stop token where it is not to be shown."""

    def __init__(
        self, detokenizer: Detokenizer, matcher: StopMatcher | None, *, include_stop: bool, min_tokens: int
    ) -> None:
        """`matcher`: of the stop strings, if there are any. They stop only behind the first `min_tokens` tokens."""
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended the text."""
        return None if self._matcher is None else self._matcher.found

    def push(self, token_ids: Sequence[int], end: ChoiceEnd | None) -> tuple[str, int]:
        """Return the text that these tokens bring, and how many of them count: all, or those up to a stop string.

        `end`: the choice has ended with them.
        """
        stop_token = token_ids[-1:] if end is not None and end.reason is FinishReason.STOP else ()
        others = token_ids[: len(token_ids) - len(stop_token)]
        shown_stop = stop_token if self._include_stop else ()
        if self._matcher is not None:
            return self._push_matched(self._matcher, token_ids, others, shown_stop, end)
        text = self._detokenizer.push([*others, *shown_stop] if shown_stop else others)
        return (text if end is None else text + self._detokenizer.flush()), len(token_ids)

    def _push_matched(
        self,
        matcher: StopMatcher,
        token_ids: Sequence[int],
        others: Sequence[int],
        shown_stop: Sequence[int],
        end: ChoiceEnd | None,
    ) -> tuple[str, int]:
        detokenizer = self._detokenizer
        parts: list[str] = []
        for index, token_id in enumerate(others):
            self._num_tokens += 1
            parts.append(matcher.push(detokenizer.push((token_id,)), can_stop=self._num_tokens > self._min_tokens))
            if matcher.found is not None:
                return "".join(parts), index + 1
        if end is None:
            return "".join(parts), len(token_ids)
        # The text of a stop token ends nothing: the choice has ended with it already.
        can_stop = not shown_stop and self._num_tokens > self._min_tokens
        parts.append(matcher.push(detokenizer.push(shown_stop) + detokenizer.flush(), can_stop=can_stop))
        if matcher.found is not None:
            return "".join(parts), len(others)
        parts.append(matcher.flush())
        return "".join(parts), len(token_ids)
