"""The requests of a chaos run: of every kind, drawn by a seed, and what each of them got."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import octavo

FIRST_PROMPT_TOKEN = 3


@dataclass(frozen=True)
class Wanted:
    """One request: what it asks for, and how many seconds after the start."""

    prompt: list[int]
    options: dict[str, Any]
    at: float


@dataclass
class Got:
    """What one request got; compared as a whole, so a changed logprob is a difference too."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[object]] = field(default_factory=dict)
    ends: list[object] = field(default_factory=list)
    error: str = ""


@dataclass
class Seen:
    """What was seen of a request while it ran: `worst_pause` in seconds."""

    got: Got = field(default_factory=Got)
    worst_pause: float = 0.0


def draw_requests(seed: int, count: int, seconds: float, vocabulary: int, max_tokens: int = 320) -> list[Wanted]:
    """Return requests that come within so many seconds: greedy and sampled, long and short, with and without penalties,
    logprobs, stop strings, several choices.
    """
    draw = random.Random(seed)
    wanted = []
    for index in range(count):
        options: dict[str, Any] = {
            "max_tokens": draw.randint(max_tokens // 4, max_tokens),
            "ignore_eos": draw.random() < 0.8,
            "temperature": draw.choice([0, 0.7, 1.0]),
            "seed": draw.getrandbits(63),
            "request_id": f"chaos-{index}",
        }
        if draw.random() < 0.3:
            options |= {"n": draw.randint(2, 3)}
        if draw.random() < 0.4:
            options |= {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.2}
        if draw.random() < 0.3:
            options |= {"top_logprobs": draw.choice([0, 2])}
        if draw.random() < 0.3:
            # Two letters: common enough in random text to be found now and then, in the middle of tokens too.
            options |= {"stop": ["".join(draw.choices("abcdefghinorst", k=2)) for _ in range(3)]}
        if draw.random() < 0.3:
            options |= {"top_p": 0.9, "top_k": 40}
        length = draw.choice([1, 5, 20, 80, 200])
        prompt = [draw.randrange(FIRST_PROMPT_TOKEN, vocabulary) for _ in range(length)]
        wanted.append(Wanted(prompt, options, seconds * index / max(1, count)))
    return wanted


class Watcher:
    """Is told what happens to requests, by their index; does nothing."""

    def got(self, index: int) -> None:
        """A request has got something."""

    def ended(self, index: int, error: str) -> None:
        """A request has ended; `error` is empty where it has ended well."""


async def run_request(client: octavo.AsyncClient, wanted: Wanted, on_token: Callable[[], None] = lambda: None) -> Seen:
    """Run one request to its end, whatever happens. Nothing is asked again here: its client does that, or not."""
    seen = Seen()
    got = seen.got
    last = time.monotonic()
    stream = client.generate(wanted.prompt, resume_grace=120.0, **wanted.options)
    try:
        async for delta in stream:
            now = time.monotonic()
            seen.worst_pause, last = max(seen.worst_pause, now - last), now
            tokens = got.token_ids.setdefault(delta.choice, [])
            if delta.first_token_index != len(tokens):
                got.error = f"a gap or a repeat: token {delta.first_token_index} where {len(tokens)} are there"
                return seen
            tokens.extend(delta.token_ids)
            got.texts[delta.choice] = got.texts.get(delta.choice, "") + delta.text
            got.logprobs.setdefault(delta.choice, []).extend(delta.logprobs)
            on_token()
        got.ends = list(stream.choices)
    except Exception as error:  # what a request ends with is what is measured
        got.error = repr(error)
    return seen


async def run_requests(
    client: octavo.AsyncClient, requests: list[Wanted], watcher: Watcher | None = None
) -> list[Seen]:
    """Run requests, each at its time, and return what they got, in their order."""
    start = time.monotonic()
    watcher = watcher or Watcher()

    async def run(index: int, wanted: Wanted) -> Seen:
        await asyncio.sleep(max(0.0, start + wanted.at - time.monotonic()))
        seen = await run_request(client, wanted, lambda: watcher.got(index))
        watcher.ended(index, seen.got.error)
        return seen

    return list(await asyncio.gather(*(run(index, wanted) for index, wanted in enumerate(requests))))
