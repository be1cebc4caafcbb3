"""Hypothesis strategies for the scheduler: executors and requests small enough to be in trouble all the time."""

from __future__ import annotations

from dataclasses import dataclass

from fakes import VOCAB_SIZE, make_spec
from hypothesis import strategies as st


@dataclass(frozen=True)
class RequestPlan:
    """What a request is to be, before it is known to which executors it will go."""

    family: int | None
    prompt_tail: tuple[int, ...]
    seed: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    num_choices: int
    resumed_tokens: int
    remaining_deadline: float | None
    tenant: str
    cache_salt: str
    reads_cache: bool
    max_cached_tokens: int | None
    writes_cache: bool

    def prompt(self, counter: int) -> tuple[int, ...]:
        """The prompt; it begins as those of its family do, or with its counter: then the KV of no other does for it."""
        head = divmod(counter, VOCAB_SIZE) if self.family is None else (self.family,) * 8
        return (*head, *self.prompt_tail)


# A pool of four slots and more: smaller ones refuse everything.
executor_specs = st.builds(
    lambda block_size, slots, max_num_seqs, budget, max_model_len, window: make_spec(
        num_blocks=1 + -(-slots // block_size),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        window=window,
    ),
    st.integers(1, 5),
    st.integers(4, 12) | st.integers(16, 36) | st.integers(24, 48),
    st.integers(1, 3) | st.integers(3, 6),
    st.integers(1, 7) | st.integers(5, 23),
    st.integers(4, 16) | st.integers(24, 40) | st.integers(30, 40),
    st.just(0) | st.integers(2, 12),
)

token_ids = st.integers(0, VOCAB_SIZE - 1)


@st.composite
def request_plans(draw: st.DrawFn) -> RequestPlan:
    """Draw a request: mostly one choice, mostly new, seldom with a deadline."""
    max_tokens = draw(st.integers(1, 4) | st.integers(8, 18))
    return RequestPlan(
        family=draw(st.sampled_from((None, 1, 1, 1, 2))),
        prompt_tail=tuple(draw(st.lists(token_ids, max_size=14))),
        seed=draw(st.integers(0, 3)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop_token_ids=tuple(draw(st.lists(token_ids, max_size=2))),
        num_choices=draw(st.sampled_from((1, 1, 1, 2, 3))),
        resumed_tokens=draw(st.sampled_from((0, 0, 0, 0, 0, 1, 4, 99))),
        remaining_deadline=draw(st.sampled_from((None, None, None, None, None, 3.0))),
        tenant=draw(st.sampled_from(("", "a"))),
        cache_salt=draw(st.sampled_from(("", "a"))),
        reads_cache=draw(st.sampled_from((True, True, True, False))),
        max_cached_tokens=draw(st.sampled_from((None, None, None, 0, 5, 9))),
        writes_cache=draw(st.sampled_from((True, True, True, False))),
    )
