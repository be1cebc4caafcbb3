"""Tokenizing: what is added, what is kept from the file, and that long texts do not stop the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizer_samples import BOS_ID, END_OF_TURN_ID, EOS_ID, TokenizerSample, all_samples, byte_level

from gateway.tokenizer import HUGE_TEXT, LONG_TEXT, Tokenizer
from octavo.models.errors import ModelError

TIMEOUT = 30.0


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    """A thread to work in."""
    with ThreadPoolExecutor(1) as threads:
        yield threads


def open_tokenizer(sample: TokenizerSample, folder: Path, executor: ThreadPoolExecutor) -> Tokenizer:
    """Write a tokenizer and open it as the gateway does."""
    return Tokenizer(sample.save(folder), 400, executor)


@pytest.mark.asyncio
@pytest.mark.parametrize("sample", all_samples(), ids=lambda sample: sample.name)
async def test_round_trip(sample: TokenizerSample, tmp_path: Path, executor: ThreadPoolExecutor) -> None:
    """Text comes back from its tokens, for every kind of tokenizer, and both ways agree with the library's."""
    tokenizer = open_tokenizer(sample, tmp_path, executor)
    token_ids = await tokenizer.encode("the cat", add_special_tokens=True)
    assert token_ids == sample.tokenizer.encode("the cat").ids
    assert await tokenizer.decode(token_ids, skip_special_tokens=True) == sample.tokenizer.decode(token_ids)


@pytest.mark.asyncio
async def test_special_tokens(tmp_path: Path, executor: ThreadPoolExecutor) -> None:
    """A BOS is added only when asked; specials in a text are tokens; they are left out of text only when asked."""
    tokenizer = open_tokenizer(byte_level(add_bos=True), tmp_path, executor)
    plain = await tokenizer.encode("the", add_special_tokens=False)
    assert await tokenizer.encode("the", add_special_tokens=True) == [BOS_ID, *plain]
    assert await tokenizer.encode("<|end|></s>", add_special_tokens=False) == [END_OF_TURN_ID, EOS_ID]
    assert await tokenizer.decode([BOS_ID, *plain], skip_special_tokens=True) == "the"
    assert await tokenizer.decode([BOS_ID, *plain], skip_special_tokens=False) == "<s>the"


@pytest.mark.asyncio
async def test_truncation_in_the_file_is_ignored(tmp_path: Path, executor: ThreadPoolExecutor) -> None:
    """A tokenizer.json that was saved with truncation or padding does not shorten or lengthen prompts."""
    sample = byte_level()
    sample.tokenizer.enable_truncation(4)
    sample.tokenizer.enable_padding(length=8)
    tokenizer = open_tokenizer(sample, tmp_path, executor)
    assert len(await tokenizer.encode("abcdefghijkl", add_special_tokens=False)) == 12
    assert len(await tokenizer.encode("a", add_special_tokens=False)) == 1


@pytest.mark.asyncio
async def test_long_texts_leave_the_loop_free(tmp_path: Path, executor: ThreadPoolExecutor) -> None:
    """While a text of megabytes is tokenized, and decoded, the event loop does many other things."""
    tokenizer = open_tokenizer(byte_level(), tmp_path, executor)
    text = "the cat sat on the mat. " * 10_000
    encoding = asyncio.create_task(tokenizer.encode(text, add_special_tokens=False))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 50
    assert await tokenizer.decode(encoding.result(), skip_special_tokens=True) == text


@pytest.mark.asyncio
async def test_both_ways_of_working_agree(tmp_path: Path, executor: ThreadPoolExecutor) -> None:
    """A text just short of the limit, worked on at once, and one at it, worked on in a thread, are tokenized alike."""
    tokenizer = open_tokenizer(byte_level(), tmp_path, executor)
    for length in (LONG_TEXT - 1, LONG_TEXT, LONG_TEXT + 1):
        token_ids = await tokenizer.encode("x" * length, add_special_tokens=False)
        assert len(token_ids) == length
        assert await tokenizer.decode(token_ids, skip_special_tokens=True) == "x" * length


def test_file_that_is_no_tokenizer(tmp_path: Path, executor: ThreadPoolExecutor) -> None:
    """A damaged file is refused by name."""
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json is no tokenizer"):
        Tokenizer(path, 10, executor)


@pytest.mark.asyncio
async def test_huge_texts_leave_a_thread_to_the_others(tmp_path: Path) -> None:
    """However many of them are asked for, by clients that leave again too, one is at work at a time; a long text has
    its thread beside them.
    """
    go_on = threading.Event()
    running: list[int] = []
    most = 0

    def huge(index: int) -> int:
        nonlocal most
        running.append(index)
        most = max(most, len(running))
        assert go_on.wait(TIMEOUT)
        running.remove(index)
        return index

    with ThreadPoolExecutor(2) as threads:
        tokenizer = open_tokenizer(byte_level(), tmp_path, threads)
        asked = [asyncio.create_task(tokenizer.run(HUGE_TEXT, lambda each=each: huge(each))) for each in range(6)]  # type: ignore[misc]
        async with asyncio.timeout(TIMEOUT):
            while not running:
                await asyncio.sleep(0.001)
            for left in asked[:2]:  # one at work, one that waits
                left.cancel()
            await asyncio.gather(*asked[:2], return_exceptions=True)
            assert await tokenizer.run(HUGE_TEXT - 1, lambda: "long") == "long"
            assert running == [0]
            go_on.set()
            assert await asyncio.gather(*asked[2:]) == [2, 3, 4, 5]
    assert most == 1
