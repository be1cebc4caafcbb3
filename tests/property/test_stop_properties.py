"""Stop strings against their simple definition: the whole text, decoded at once, searched from its start."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_detokenizer_properties import SAMPLES, VOCABULARIES, ids_of
from tokenizer_samples import TokenizerSample

from gateway.detokenizer import Detokenizer, decode
from gateway.output_text import OutputText
from gateway.requests import ChoiceEnd, FinishReason
from gateway.stop_matcher import StopMatcher, StopStrings

# Few letters, so that stop strings overlap, contain and almost are one another.
LETTERS = st.text("abé😀", max_size=24)
STOPS = st.lists(st.text("abé😀", min_size=1, max_size=5), min_size=1, max_size=5, unique=True)
CUTS = st.lists(st.integers(0, 40), max_size=8)
LENGTH = ChoiceEnd(FinishReason.LENGTH)


def first_stop(text: str, stops: list[str], least_end: int = 0) -> tuple[int, str] | None:
    """Return where the first stop string to be complete ends, and which it is: the longest of those that end there."""
    for end in range(max(1, least_end), len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end, max(complete, key=len)
    return None


def pieces_of(whole: list[int], cuts: list[int]) -> list[list[int]]:
    """Cut tokens into pieces, some of them empty."""
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    return [whole[start:stop] for start, stop in itertools.pairwise(edges)]


@example(text="a", stops=["ab"], cuts=[], include=False)
@given(text=LETTERS, stops=STOPS, cuts=CUTS, include=st.booleans())
def test_every_cut_gives_the_same_text(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    """A1: however a text is cut, it ends where the first stop string begins, or ends where that is to be shown."""
    matcher = StopMatcher(StopStrings(stops), include_stop=include)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    shown = "".join([matcher.push(text[start:stop]) for start, stop in itertools.pairwise(edges)]) + matcher.flush()
    found = first_stop(text, stops)
    if found is None:
        assert (shown, matcher.found) == (text, None)
    else:
        end, stop = found
        assert (shown, matcher.found) == (text[: end if include else end - len(stop)], stop)
    assert matcher.push("behind") == ("" if found else "behind") or any(stop[0] in "behind" for stop in stops)


@given(text=LETTERS, stops=STOPS)
def test_nothing_is_held_but_what_can_become_a_stop(text: str, stops: list[str]) -> None:
    """A1, A2: what is not shown yet is the longest end of the text that begins a stop string; with include, nothing."""
    matcher = StopMatcher(StopStrings(stops), include_stop=False)
    eager = StopMatcher(StopStrings(stops), include_stop=True)
    shown = ""
    for index, character in enumerate(text):
        shown += matcher.push(character)
        at_once = eager.push(character)
        if matcher.found is not None:
            break
        so_far = text[: index + 1]
        starts = {stop[:length] for stop in stops for length in range(len(stop))}
        held = max((start for start in starts if so_far.endswith(start)), key=len)
        assert shown == so_far[: len(so_far) - len(held)]
        assert at_once == character


@given(text=LETTERS, stops=STOPS, least=st.integers(0, 24))
def test_a_stop_that_may_not_be_is_text(text: str, stops: list[str], least: int) -> None:
    """What is complete while nothing may stop is shown; a later stop that overlaps it is found all the same."""
    matcher = StopMatcher(StopStrings(stops), include_stop=True)
    shown = "".join(matcher.push(character, can_stop=index >= least) for index, character in enumerate(text))
    found = first_stop(text, stops, least + 1)
    assert matcher.found == (found[1] if found else None)
    assert shown == (text[: found[0]] if found else text)


def completing_token(sample: TokenizerSample, token_ids: list[int], end: int) -> int:
    """Return how many tokens it takes until the first `end` characters of the text are there for good."""
    for count in range(len(token_ids) + 1):
        if len(Detokenizer(VOCABULARIES[sample.name]).push(token_ids[:count])) >= end:
            return count
    return len(token_ids)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
@given(data=st.data())
def test_every_tokenizer_and_every_split(sample: TokenizerSample, data: st.DataObject) -> None:
    """Text and kept tokens are those of the whole decoding, whatever the tokens, the cuts, min_tokens and the end."""
    vocabulary = VOCABULARIES[sample.name]
    token_ids = data.draw(ids_of(sample))
    whole = decode(vocabulary, token_ids)
    edges = st.integers(0, len(whole))
    parts = st.tuples(edges, edges).map(lambda pair: whole[min(pair) : max(pair)][:6])
    stops = data.draw(st.lists(parts | st.text("the cat", max_size=3), min_size=1, max_size=4, unique=True))
    stops = [stop for stop in stops if stop] or ["never there"]
    include, min_tokens = data.draw(st.booleans()), data.draw(st.integers(0, 6))
    ends = [completing_token(sample, token_ids, end) for end in range(len(whole) + 1)]
    least_end = next((end for end, count in enumerate(ends) if count > min_tokens), len(whole) + 1)

    text = OutputText(
        Detokenizer(vocabulary),
        StopMatcher(StopStrings(stops), include_stop=include),
        include_stop=include,
        min_tokens=min_tokens,
    )
    shown, num_kept = "", 0
    pieces = pieces_of(token_ids, data.draw(CUTS))
    for index, piece in enumerate(pieces):
        new, kept = text.push(piece, LENGTH if index == len(pieces) - 1 else None)
        shown, num_kept = shown + new, num_kept + kept
        assert whole.startswith(shown), "what is shown is never taken back"
        if text.stop_string is not None:
            break

    found = first_stop(whole, stops, least_end)
    if found is None:
        assert (shown, num_kept, text.stop_string) == (whole, len(token_ids), None)
    else:
        end, stop = found
        assert (shown, num_kept, text.stop_string) == (whole[: end if include else end - len(stop)], ends[end], stop)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
@given(data=st.data())
def test_a_stop_token_is_shown_where_that_is_asked_for(sample: TokenizerSample, data: st.DataObject) -> None:
    """With or without stop strings in the request, the text is that of all tokens, or of all but the stop token."""
    vocabulary = VOCABULARIES[sample.name]
    token_ids = data.draw(ids_of(sample).filter(bool))
    end = ChoiceEnd(FinishReason.STOP, stop_token_id=token_ids[-1])
    for include, is_searched in itertools.product((False, True), (False, True)):
        matcher = StopMatcher(StopStrings(["never\u0000there"]), include_stop=include) if is_searched else None
        text = OutputText(Detokenizer(vocabulary), matcher, include_stop=include, min_tokens=0)
        pieces = pieces_of(token_ids[:-1], data.draw(CUTS))
        shown = "".join(text.push(piece, None)[0] for piece in pieces[:-1])
        new, kept = text.push([*pieces[-1], token_ids[-1]], end)
        assert shown + new == decode(vocabulary, token_ids if include else token_ids[:-1])
        assert kept == len(pieces[-1]) + 1
