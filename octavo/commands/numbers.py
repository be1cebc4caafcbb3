"""Numbers and texts of flags, for argparse, which itself names neither the range nor what it wants."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def number(least: float, most: float, *, is_above: bool = False) -> Callable[[str], float]:
    """Return a parser of numbers from `least` to `most`; `is_above`: without `least` itself."""
    wanted = f"a number above {least} and at most {most}" if is_above else f"a number from {least} to {most}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        # What is no number is in no range.
        if not least <= value <= most or (is_above and value == least):
            raise argparse.ArgumentTypeError(f"must be {wanted}, is {text!r}")
        return value

    return parse


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from `least` to `most`."""

    def parse(text: str) -> int:
        digits = text.removeprefix("-")
        # The length is looked at first: Python refuses to read numbers of thousands of digits.
        is_number = digits.isascii() and digits.isdecimal() and len(digits) <= 20
        if not is_number or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, is {text!r}")
        return int(text)

    return parse


def text(most_characters: int) -> Callable[[str], str]:
    """Return a parser of texts of so many characters, all of them such that they can be sent."""

    def parse(value: str) -> str:
        if not 1 <= len(value) <= most_characters:
            wanted = f"a text of 1 to {most_characters} characters"
            raise argparse.ArgumentTypeError(f"must be {wanted}, has {len(value)}")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise argparse.ArgumentTypeError("must be valid UTF-8 text") from None
        return value

    return parse
