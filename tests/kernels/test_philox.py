"""The noise generator against its published vectors, and the numbers made of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from executor_svc.kernels import KernelSet
from executor_svc.kernels.noise.reference import philox4x32
from executor_svc.kernels.noise.reference import uniform_numbers as uniform


@pytest.mark.parametrize(
    ("counter", "key", "block"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], block: tuple[int, ...]) -> None:
    """The three known-answer vectors of Random123 for philox4x32 with 10 rounds come out bit for bit."""
    result = philox4x32(np.array([counter], dtype=np.uint32), np.array([key], dtype=np.uint32))
    assert tuple(result[0].tolist()) == block


def _one(seed: int, choice: int, position: int, lane: int = 0) -> float:
    return float(uniform(np.array([seed], dtype=np.uint64), np.array([choice]), np.array([position]), lane)[0])


def test_uniform_takes_key_and_counter_words_as_documented() -> None:
    """The number is 53 bits of the block of key (low, high half of the seed), counter (choice, position, lane, 0)."""
    seed, choice, position, lane = 0x299F31D0_A4093822, 7, 1 << 31, 3
    counter = np.array([(choice, position, lane, 0)], dtype=np.uint32)
    block = philox4x32(counter, np.array([(0xA4093822, 0x299F31D0)], dtype=np.uint32))[0].tolist()
    assert _one(seed, choice, position, lane) == ((block[0] << 21) | (block[1] >> 11)) / 2**53


def test_uniform_is_a_function_of_the_row_alone() -> None:
    """A row's number does not depend on which other rows are drawn with it."""
    seeds = np.array([0, 1, 2**64 - 1, 1], dtype=np.uint64)
    choices, positions = np.array([0, 5, 127, 5]), np.array([0, 17, 2**32 - 1, 18])
    together = uniform(seeds, choices, positions).tolist()
    assert together == [_one(int(s), int(c), int(p)) for s, c, p in zip(seeds, choices, positions, strict=True)]


def test_seed_choice_position_and_lane_all_matter() -> None:
    """Changing any one of seed (either half), choice, position or lane gives another number (E10)."""
    places = [
        (7, 0, 9, 0),
        (8, 0, 9, 0),
        (7 + (1 << 32), 0, 9, 0),
        (7, 1, 9, 0),
        (7, 0, 10, 0),
        (7, 0, 9, 1),
        (7, 9, 0, 0),
    ]
    assert len({_one(*place) for place in places}) == len(places)


def test_uniform_fills_the_unit_interval_evenly() -> None:
    """Over 100,000 positions the numbers lie in [0, 1) and each tenth of it gets a tenth of them, within five sigma."""
    count = 100_000
    numbers = uniform(np.full(count, 42, dtype=np.uint64), np.zeros(count, dtype=np.int64), np.arange(count))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    tenths = np.bincount((numbers * 10).astype(int), minlength=10)
    assert np.abs(tenths - count / 10).max() < 5 * np.sqrt(count * 0.1 * 0.9)


def test_no_rows() -> None:
    """No rows give no numbers."""
    assert uniform(np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)).shape == (0,)


def test_every_set_gives_the_same_numbers(any_set: KernelSet) -> None:
    """Every set gives the very same numbers, over all bits of seed, choice, position and lane."""
    rng = np.random.default_rng(6)
    seeds = rng.integers(0, 2**64, size=500, dtype=np.uint64)
    choices, positions = rng.integers(0, 2**32, size=(2, 500))
    columns = [torch.from_numpy(each) for each in (seeds, choices, positions)]
    for lane in (0, 1, 7):
        numbers = any_set.uniform(*columns, lane)
        assert (numbers.dtype, numbers.tolist()) == (torch.float64, uniform(seeds, choices, positions, lane).tolist())
    every_other = any_set.uniform(*(each[::2] for each in columns))
    assert every_other.tolist() == uniform(seeds, choices, positions)[::2].tolist()
    assert len(any_set.uniform(*(each[:0] for each in columns))) == 0
