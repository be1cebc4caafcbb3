"""The fixed workloads, as token ids: the same for Octavo and for every peer. Standard library only.

W1  one stream, 128 tokens in, 128 out
W2  64 requests of mixed lengths: prompts lognormal about 220 tokens, outputs about 100
W3  64 requests that share 512 tokens and have 32 of their own, 64 out
W4  W2's requests, each sent at its arrival: Poisson, at a rate in requests a second

Ids are ordinary ones of SmolLM2's vocabulary: no engine adds, drops or merges any, so lengths are exact everywhere.
Each repeat moves every id by a constant. Lengths and the shared prefix stay, and no repeat meets what an earlier one
left in a prefix cache.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

NAMES = ("W1", "W2", "W3", "W4")
RATE = 3.8
"""Requests a second of W4: about 70 % of what the fastest peer takes on the machine the project is developed on."""
NUM_REQUESTS = 64
PREFIX_TOKENS = 512
NUM_IDS = 49_000
"""Ids end before this: those behind it are rare or special in SmolLM2's vocabulary of 49152."""
_FIRST_ID = 100
_STRIDE = 7919
"""Prime, and no factor of the number of ids: repeats come back to the same ids only after all of them."""
_WARM_UP_REPEAT = 10_000
"""Far from the numbers of real repeats."""


@dataclass(frozen=True)
class Request:
    """A prompt, the exact number of tokens to generate, and the second after the start at which it is sent."""

    prompt: tuple[int, ...]
    num_output_tokens: int
    arrival: float = 0.0


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival. The first `num_shared` tokens are the same in all prompts."""

    name: str
    requests: tuple[Request, ...]
    num_shared: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, shared ones as often as they are sent."""
        return sum(len(request.prompt) for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        """Tokens that all requests generate."""
        return sum(request.num_output_tokens for request in self.requests)


def build(
    name: str, repeat: int = 0, *, rate: float = RATE, num_ids: int = NUM_IDS, num_requests: int = NUM_REQUESTS
) -> Workload:
    """Return a workload as its `repeat`-th run sends it.

    `num_ids`: for models of smaller vocabularies, where ids end; `num_requests`: keep only the first of W2 to W4, for
    a look that takes less time. Raises ValueError: a name that is not in NAMES, or no ids.
    """
    if num_ids <= _FIRST_ID:
        raise ValueError(f"a vocabulary of {num_ids} tokens is too small for the workloads")
    # One source of chance for all, drawn in a fixed order, so that none depends on which others are run.
    chance = random.Random(0)
    single = [Request(_ids(chance, 128), 128)]
    mixed = [_mixed_request(chance) for _ in range(NUM_REQUESTS)]
    prefix = _ids(chance, PREFIX_TOKENS)
    shared = [Request(prefix + _ids(chance, 32), 64) for _ in range(NUM_REQUESTS)]
    made: dict[str, tuple[Sequence[Request], int]] = {
        "W1": (single, 0),
        "W2": (mixed, 0),
        "W3": (shared, PREFIX_TOKENS),
        "W4": (_with_arrivals(mixed, rate), 0),
    }
    if name not in made:
        raise ValueError(f"no workload {name!r}: there are {', '.join(NAMES)}")
    requests, num_shared = made[name]
    moved = (
        Request(_move(request.prompt, repeat, num_ids), request.num_output_tokens, request.arrival)
        for request in requests[:num_requests]
    )
    return Workload(name, tuple(moved), num_shared)


def warm_up(round_number: int, *, num_ids: int = NUM_IDS) -> Workload:
    """Return eight short requests of other ids than any repeat: what an engine makes once, it makes for these."""
    mixed = build("W2", _WARM_UP_REPEAT + round_number, num_ids=num_ids).requests[:8]
    short = (Request(request.prompt[: 24 + 7 * index], 8) for index, request in enumerate(mixed))
    return Workload("warm-up", tuple(short))


def _mixed_request(chance: random.Random) -> Request:
    prompt = _ids(chance, _lognormal(chance, 220, 1.0, 16, 1024))
    return Request(prompt, _lognormal(chance, 100, 0.6, 16, 256))


def _ids(chance: random.Random, count: int) -> tuple[int, ...]:
    return tuple(chance.randrange(_FIRST_ID, NUM_IDS) for _ in range(count))


def _lognormal(chance: random.Random, mean: float, sigma: float, least: int, most: int) -> int:
    """Draw a length. `mean` is that of the lengths, `sigma` the deviation of their natural logarithm."""
    drawn = chance.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
    return min(most, max(least, round(drawn)))


def _with_arrivals(requests: Sequence[Request], rate: float) -> list[Request]:
    chance, at, made = random.Random(1), 0.0, []
    for request in requests:
        made.append(Request(request.prompt, request.num_output_tokens, at))
        at += chance.expovariate(rate)
    return made


def _move(prompt: tuple[int, ...], repeat: int, num_ids: int) -> tuple[int, ...]:
    return tuple(_FIRST_ID + (token - _FIRST_ID + _STRIDE * repeat) % (num_ids - _FIRST_ID) for token in prompt)
