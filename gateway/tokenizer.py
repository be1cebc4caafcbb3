"""Text to token ids and back, by the model's tokenizer.json."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import TypeVar

import tokenizers

from gateway.detokenizer import decode
from gateway.vocabulary import Vocabulary
from octavo.models.errors import ModelError

LONG_TEXT = 2_000
"""Characters or token ids from which work goes to a thread: about a millisecond of it."""
HUGE_TEXT = 200_000
"""From here on it is a tenth of a second, and up to half a minute: one at a time, so that all others find a thread."""

_Result = TypeVar("_Result")


class Tokenizer:
    """One model's tokenizer. Long input is worked on in `executor`'s threads, so that the event loop goes on."""

    def __init__(self, file: Path, vocab_size: int, executor: Executor) -> None:
        """`vocab_size`: the model's, which may be larger than the tokenizer's. Raises ModelError."""
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{file} is no tokenizer: {error}: run `octavo prepare` on the model again") from error
        # Either would change prompts without a word.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokens = {token_id: token for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
        added = tokenizer.get_added_tokens_decoder()
        special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        decoder = json.loads(file.read_text(encoding="utf-8")).get("decoder")
        self.vocabulary = Vocabulary(tokens, special_ids, decoder, vocab_size)
        self._tokenizer = tokenizer
        self._executor = executor
        self._huge = asyncio.Semaphore(1)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text; `add_special_tokens`: with what the tokenizer adds itself, such as a BOS."""
        return await self.run(len(text), lambda: self._encode(text, add_special_tokens))

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids, each below the vocabulary size."""
        vocabulary = self.vocabulary
        return await self.run(
            len(token_ids), lambda: decode(vocabulary, token_ids, skip_special_tokens=skip_special_tokens)
        )

    async def run(self, size: int, work: Callable[[], _Result]) -> _Result:
        """Do `work` on `size` characters or tokens: here where that is quick, else in a thread."""
        if size < LONG_TEXT:
            return work()
        if size < HUGE_TEXT:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        await self._huge.acquire()
        loop = asyncio.get_running_loop()

        def release(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                loop.call_soon_threadsafe(self._huge.release)

        # Whoever asked may leave: the thread has it to its end nevertheless.
        future = self._executor.submit(work)
        future.add_done_callback(release)
        return await asyncio.wrap_future(future)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # `encode` holds the GIL from start to end, the batch form does not.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        token_ids: list[int] = encoding.ids
        return token_ids
