"""Prompts of a wanted length, out of natural-ish text.

Where the server takes token ids and tells how it tokenizes, a prompt has exactly the wanted tokens. Elsewhere it is
text of about that length: how many tokens a word makes is asked of the server first, and what it counted for each
request is in the figures. No two prompts begin alike, so a prefix cache gives nothing away unless a shared prefix is
asked for.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from octavo.bench.target import Target

# Common English words, common ones first: they are drawn with weights that fall as natural text's do.
_WORDS = """
the of and to a in that it was for on are as with they at be this from have or by one had not but what all were when
we there can an your which their said if do will each about how up out them then she many some so these would other
into has more her two like him see time could no make than first been its who now people my made over did down only way
find use may water long little very after words called just where most know get through back much before go good new
write our used me man too any day same right look think also around another came come work three word must because does
part even place well such here take why things help put years different away again off went old number great tell men
say small every found still between name should home big give air line set own under read last never us left end along
while might next sound below saw something thought both few those always looked show large often together asked house
world going want school important until form food keep children feet land side without boy once animals life enough
took sometimes four head above kind began almost live page got earth need far hand high year mother light parts country
father let night following picture being study second eyes soon times story boys since white days ever paper hard near
sentence better best across during today others however sure means knew try told young miles sun ways thing whole hear
example heard several change answer room sea against top turned learn point city play toward five using himself usually
money seen car morning river lamp island harbour winter stone letter window bridge garden captain market travel machine
""".split()  # noqa: SIM905 - prose reads better as prose
_CUMULATIVE_WEIGHTS = list(accumulate(1.0 / (rank + 3) for rank in range(len(_WORDS))))
_POOL_WORDS = 12_000
_SEGMENT_TOKENS = (4, 12)
"""Shorter than a KV block, so that two prompts share one only if two stretches in a row are the same by chance."""
_FIT_WORDS = (40, 440)
_TOKENS_PER_WORD = 1.3
"""Of English with its full stops, for a server that does not count; a common figure for today's vocabularies."""


class PromptMaker(Protocol):
    """Makes prompts."""

    def make(self, generator: random.Random, num_tokens: int) -> str | Sequence[int]:
        """Return the shared prefix and then `num_tokens` (at least 1) tokens, or text of about that many."""


def natural_text(generator: random.Random, num_words: int) -> str:
    """Return `num_words` words in sentences of 6 to 14."""
    words = generator.choices(_WORDS, cum_weights=_CUMULATIVE_WEIGHTS, k=num_words)
    sentences = []
    start = 0
    while start < num_words:
        length = generator.randint(6, 14)
        sentences.append(" ".join(words[start : start + length]).capitalize() + ".")
        start += length
    return " ".join(sentences)


class TokenPrompts:
    """Prompts of exact length: short stretches of a long tokenized text, end to end."""

    def __init__(self, pool: Sequence[int], prefix: Sequence[int] = ()) -> None:
        """`pool` is the text's token ids, more than a stretch has; `prefix` begins every prompt."""
        assert len(pool) > _SEGMENT_TOKENS[1]
        self._pool = pool
        self._prefix = tuple(prefix)

    def make(self, generator: random.Random, num_tokens: int) -> tuple[int, ...]:
        """Return the prefix and `num_tokens` ids."""
        token_ids: list[int] = []
        while len(token_ids) < num_tokens:
            length = generator.randint(*_SEGMENT_TOKENS)
            start = generator.randrange(len(self._pool) - length)
            token_ids += self._pool[start : start + length]
        return (*self._prefix, *token_ids[:num_tokens])


class TextPrompts:
    """Prompts of about the wanted length."""

    def __init__(self, tokens_per_word: float, extra_tokens: float = 0.0, prefix: str = "") -> None:
        """`extra_tokens` come with every prompt whatever its length: a chat template's, say."""
        assert tokens_per_word > 0
        self._tokens_per_word = tokens_per_word
        self._extra_tokens = extra_tokens
        self._prefix = prefix

    def make(self, generator: random.Random, num_tokens: int) -> str:
        """Return the prefix and words that make about `num_tokens` tokens, at least one word."""
        return self._prefix + natural_text(generator, self.num_words(num_tokens))

    def num_words(self, num_tokens: int) -> int:
        """Return how many words make about `num_tokens` tokens; at least 1."""
        return max(1, round((num_tokens - self._extra_tokens) / self._tokens_per_word))


async def prompt_maker(target: Target, seed: int, prefix_tokens: int) -> PromptMaker:
    """Return a maker that fits the server. Raises BenchError where the server refuses the questions."""
    generator = random.Random(f"{seed}/pool")
    pool = await target.encode(natural_text(generator, _POOL_WORDS))
    if pool is not None:
        prefix = TokenPrompts(pool).make(generator, prefix_tokens) if prefix_tokens else ()
        return TokenPrompts(pool, prefix)
    short, long = (natural_text(generator, num_words) for num_words in _FIT_WORDS)
    counts = await target.count_tokens(short), await target.count_tokens(long)
    tokens_per_word, extra_tokens = _TOKENS_PER_WORD, 0.0
    if counts[0] is not None and counts[1] is not None and counts[1] > counts[0]:
        tokens_per_word = (counts[1] - counts[0]) / (_FIT_WORDS[1] - _FIT_WORDS[0])
        extra_tokens = max(0.0, counts[0] - tokens_per_word * _FIT_WORDS[0])
    prefix_words = round(prefix_tokens / tokens_per_word)
    prefix_text = natural_text(generator, prefix_words) + " " if prefix_words else ""
    return TextPrompts(tokens_per_word, extra_tokens, prefix_text)
