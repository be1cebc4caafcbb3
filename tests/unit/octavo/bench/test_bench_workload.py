"""What is sent: lengths, prompts, files and traces; repeatable, and refused with the place that is wrong."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
from fake_target import FakeTarget

from octavo.bench.prompts import TextPrompts, TokenPrompts, natural_text, prompt_maker
from octavo.bench.records import BenchError
from octavo.bench.settings import parse_objectives
from octavo.bench.workload import (
    MOST_TOKENS,
    Entry,
    Lengths,
    Workload,
    WorkloadPlan,
    build_workload,
    read_prompts,
    read_trace,
)

POOL = list(range(1000, 5000))


def build(**plan: object) -> Workload:
    """Build with lengths of 32 in and 8 out unless said otherwise."""
    defaults: dict[str, object] = {"input_tokens": Lengths("32"), "output_tokens": Lengths("8")}
    return build_workload(WorkloadPlan(**(defaults | plan)), TokenPrompts(POOL))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "mean", "deviation", "least", "most"),
    [
        ("128", 128, 0, 128, 128),
        ("64-256", 160, 55.7, 64, 256),
        ("normal:256,64", 256, 64, 1, 10_000_000),
        # Mean and deviation of a lognormal: median * exp(s^2 / 2), mean * sqrt(exp(s^2) - 1).
        ("lognormal:200,0.5", 226.6, 120.8, 1, 10_000_000),
    ],
)
def test_lengths_have_the_distribution_they_are_named_after(
    text: str, mean: float, deviation: float, least: int, most: int
) -> None:
    """Mean, deviation and bounds of 20,000 draws."""
    lengths, generator = Lengths(text), random.Random(0)
    drawn = [lengths.draw(generator) for _ in range(20_000)]
    assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.02)
    assert statistics.pstdev(drawn) == pytest.approx(deviation, rel=0.04)
    assert least <= min(drawn)
    assert max(drawn) <= most
    assert str(lengths) == text


def test_a_length_is_at_least_one() -> None:
    """A normal distribution reaches below zero; a prompt cannot."""
    lengths, generator = Lengths("normal:1,50"), random.Random(0)
    assert min(lengths.draw(generator) for _ in range(1000)) == 1


@pytest.mark.parametrize(
    "text", ["", "0", "-5", "9-3", "1.5", "many", "normal:5", "normal:0,1", "gamma:1,2", "lognormal:5,nan", "1-2-3"]
)
def test_a_length_that_is_none_is_refused(text: str) -> None:
    """The message lists what is possible."""
    with pytest.raises(ValueError, match="LEAST-MOST, normal:MEAN,DEVIATION or lognormal"):
        Lengths(text)


def test_objectives_have_units() -> None:
    """A bare number could be of either unit, so it is refused, as is a name that no figure has."""
    assert parse_objectives("ttft=200ms, itl=0.05s") == {"ttft": 0.2, "itl": 0.05}
    for text, wrong in (("ttft=200", "with its unit"), ("itl=-1s", "above 0"), ("p99=1s", "there are ttft, itl")):
        with pytest.raises(ValueError, match=wrong):
            parse_objectives(text)


def test_token_prompts_are_exact_and_do_not_begin_alike() -> None:
    """200 prompts have the wanted lengths, pool tokens alone, and 200 different beginnings of one KV block."""
    maker, generator = TokenPrompts(POOL), random.Random(3)
    prompts = [maker.make(generator, length) for length in range(16, 216)]
    assert [len(prompt) for prompt in prompts] == list(range(16, 216))
    assert len({prompt[:16] for prompt in prompts}) == 200
    assert all(1000 <= token < 5000 for prompt in prompts for token in prompt)


def test_a_shared_prefix_comes_first_and_on_top() -> None:
    """Every prompt begins with it; the wanted length follows."""
    maker = TokenPrompts(POOL, range(48))
    prompts = [maker.make(random.Random(seed), 10) for seed in range(2)]
    assert all(prompt[:48] == tuple(range(48)) and len(prompt) == 58 for prompt in prompts)
    assert prompts[0] != prompts[1]


def test_text_prompts_make_up_for_the_template() -> None:
    """With 1.5 tokens a word and 20 of a template, 170 tokens are 100 words; fewer than the template's are one."""
    maker = TextPrompts(1.5, extra_tokens=20.0, prefix="Once. ")
    text = maker.make(random.Random(0), 170)
    assert text.startswith("Once. ")
    assert len(text.split()) == 101
    assert maker.num_words(5) == 1


def test_natural_text_is_sentences_of_words_as_frequent_as_in_text() -> None:
    """The commonest word is common but no majority; sentences begin with a capital and end with a full stop."""
    text = natural_text(random.Random(0), 5000)
    words = text.lower().replace(".", "").split()
    assert len(words) == 5000
    assert 0.03 < words.count("the") / 5000 < 0.15
    assert text[0].isupper()
    assert text.endswith(".")
    assert len(set(words)) > 200


def test_the_maker_fits_the_server() -> None:
    """A server that gives ids gets exact prompts with the prefix; one that only counts, text of about the length."""

    class Counting(FakeTarget):
        async def encode(self, text: str) -> Sequence[int] | None:
            return None

        async def count_tokens(self, text: str) -> int | None:
            return 2 * len(text.split()) + 30

    class Silent(Counting):
        async def count_tokens(self, text: str) -> int | None:
            return None

    exact = asyncio.run(prompt_maker(FakeTarget(), 0, 16))
    assert len(exact.make(random.Random(0), 100)) == 116
    fitted = asyncio.run(prompt_maker(Counting(), 0, 40))
    # 70 tokens after the template's 30, two a word, beside 20 words of prefix.
    assert len(str(fitted.make(random.Random(0), 100)).split()) == 20 + 35
    assumed = asyncio.run(prompt_maker(Silent(), 0, 0))
    assert len(str(assumed.make(random.Random(0), 130)).split()) == 100


def test_a_workload_is_repeatable_and_its_seed_matters() -> None:
    """The same plan gives the same requests, whatever the warm-up; another seed others."""
    plan: dict[str, object] = {"num_requests": 20, "input_tokens": Lengths("8-64"), "rate": 2.0}
    first, again = build(**plan, num_warmup=3), build(**plan, num_warmup=0)
    assert first.measured == again.measured
    assert build(**plan, seed=1).measured != first.measured
    assert not {tuple(each.prompt) for each in first.warmup} & {tuple(each.prompt) for each in first.measured}
    assert len(first.warmup) == 3


def test_requests_without_a_rate_have_no_arrival() -> None:
    """They are for a closed loop; with a rate the arrivals rise."""
    assert {each.arrival for each in build(num_requests=5).measured} == {None}
    arrivals = [each.arrival or 0.0 for each in build(num_requests=5, rate=1.0).measured]
    assert arrivals == sorted(arrivals)
    assert len(set(arrivals)) == 5


def test_prompts_of_a_file_are_taken_in_turn(tmp_path: Path) -> None:
    """Three prompts for five requests; each keeps its own limit."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n\n{"prompt": "two", "max_tokens": 3}\n{"prompt_tokens": 7}\n')
    requests = build(num_requests=5, prompts=read_prompts(path)).measured
    assert [request.prompt for request in requests[:2] + requests[3:]] == ["one", "two", "one", "two"]
    assert len(requests[2].prompt) == 7
    assert [request.max_tokens for request in requests] == [8, 3, 8, 8, 3]


def test_plain_text_prompts_are_lines(tmp_path: Path) -> None:
    """Empty lines are none; an empty file is an error."""
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\ntwo\n")
    assert read_prompts(path) == [Entry("one"), Entry("two")]
    path.write_text("\n")
    with pytest.raises(BenchError, match="has no prompt"):
        read_prompts(path)


def test_a_trace_is_played_by_its_arrivals(tmp_path: Path) -> None:
    """Lines may be in any order; what a line leaves out, the flags decide; a number cuts it."""
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival": 2.5, "prompt_tokens": 5, "max_tokens": 4}\n{"arrival": 0, "prompt": "hi"}\n{"arrival": 1}\n'
    )
    requests = build(trace=read_trace(path)).measured
    assert [request.arrival for request in requests] == [0.0, 1.0, 2.5]
    assert requests[0].prompt == "hi"
    assert [len(request.prompt) for request in requests[1:]] == [32, 5]
    assert [request.max_tokens for request in requests] == [8, 8, 4]
    assert len(build(trace=read_trace(path), num_requests=2).measured) == 2


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("{", "not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"prompt": "x"}', "arrival: is missing"),
        ('{"arrival": -1}', "arrival: must be a number of seconds"),
        ('{"arrival": NaN}', "arrival: must be a number of seconds"),
        (f'{{"arrival": 1{"0" * 400}}}', "arrival: must be a number of seconds"),
        ('{"arrival": 1e300}', "arrival: must be a number of seconds"),
        ("[" * 20_000, "nested too deep"),
        (r'{"arrival": 1, "prompt": "\ud800"}', "prompt: must be text"),
        ('{"arrival": true}', "arrival: must be a number of seconds"),
        ('{"arrival": 1, "prompt": ""}', "prompt: must be text"),
        ('{"arrival": 1, "prompt": "x", "prompt_tokens": 3}', "give one of them"),
        ('{"arrival": 1, "prompt_tokens": 0}', "prompt_tokens: must be a whole number"),
        ('{"arrival": 1, "max_tokens": 1.5}', "max_tokens: must be a whole number"),
        ('{"arrival": 1, "tokens": 3}', "tokens: no such field"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, line: str, wrong: str) -> None:
    """File, line number, field and what it must be."""
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{{"arrival": 0}}\n{line}\n')
    with pytest.raises(BenchError, match=f"trace.jsonl line 2: .*{wrong}"):
        read_trace(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Missing, not text, or without a request."""
    with pytest.raises(BenchError, match=r"--trace: cannot read .*No such file"):
        read_trace(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BenchError, match=r"--prompts: .* is not UTF-8"):
        read_prompts(tmp_path / "binary")
    (tmp_path / "empty").write_text("")
    with pytest.raises(BenchError, match="has no request"):
        read_trace(tmp_path / "empty")


def test_a_duration_too_short_for_any_arrival_is_refused() -> None:
    """No request in the run would be no figures; the message says what to raise."""
    with pytest.raises(BenchError, match="raise --rate or --duration"):
        build(rate=0.001, duration=0.5)


def test_a_wide_distribution_has_lengths_all_the_same() -> None:
    """Draws that no number holds are the longest length, and not an error of arithmetic."""
    generator = random.Random(1)
    lengths = Lengths("lognormal:8,2000")
    assert {lengths.draw(generator) for _ in range(50)} == {1, MOST_TOKENS}
    assert Lengths("normal:8,1e308").draw(generator) in (1, MOST_TOKENS)


def test_arrivals_without_number_are_refused_before_they_are_drawn() -> None:
    """A rate and a duration that come to more requests than memory holds are named."""
    with pytest.raises(BenchError, match="--rate, --duration: more than 10000000 requests"):
        build(rate=1e9, duration=1e9)
    assert len(build(rate=1e9, duration=1e9, num_requests=3).measured) == 3


def test_only_line_ends_end_a_line(tmp_path: Path) -> None:
    """Characters that end a line for Unicode, and not for a file, are part of a prompt."""
    text = "one\u2028two\x0cthree"
    path = tmp_path / "trace.jsonl"
    path.write_text(
        json.dumps({"arrival": 0, "prompt": text}, ensure_ascii=False) + "\r\n", encoding="utf-8", newline=""
    )
    assert [entry.prompt for entry in read_trace(path)] == [text]
    plain = tmp_path / "prompts.txt"
    plain.write_text(f"{text}\nnext\n", encoding="utf-8")
    assert [entry.prompt for entry in read_prompts(plain)] == [text, "next"]
