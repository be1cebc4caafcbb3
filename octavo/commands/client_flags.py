"""The flags that the clients among the commands share: whom to ask, and how tokens are chosen."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo.commands.numbers import number, text, whole_number
from octavo.rpc.settings import parse_address, parse_api_key

if TYPE_CHECKING:
    from octavo.client.types import GenerateOptions

_MOST_TOKENS = 2**32 - 1
_SAMPLING: tuple[tuple[str, Callable[[str], float], str, str], ...] = (
    ("temperature", number(0, 2), "X", "0 to 2; 0 always takes the likeliest token"),
    ("top_p", number(0, 1, is_above=True), "X", "keep the smallest set of tokens with this much probability"),
    ("top_k", whole_number(0, _MOST_TOKENS), "N", "keep this many likeliest tokens; 0 keeps all"),
    ("min_p", number(0, 1), "X", "keep tokens at least this likely relative to the likeliest"),
    ("repetition_penalty", number(0, 2, is_above=True), "X", "over 1: less of what prompt and output hold already"),
    ("presence_penalty", number(-2, 2), "X", "-2 to 2: over 0, less of what the output holds already"),
    ("frequency_penalty", number(-2, 2), "X", "-2 to 2: the same, by how often"),
    ("seed", whole_number(0, 2**64 - 1), "N", "the same seed gives the same output"),
    ("max_tokens", whole_number(1, _MOST_TOKENS), "N", "most tokens to write"),
    ("min_tokens", whole_number(0, _MOST_TOKENS), "N", "fewest tokens to write"),
)
_MOST_STOP_CHARACTERS = 1024
_SECONDS = number(0.001, 86_400)
_SCHEDULING: tuple[tuple[str, Callable[[str], object], str, str], ...] = (
    ("priority", whole_number(-100, 100), "N", "-100 to 100: higher goes first where the policy is `priority`"),
    ("queue_ttl", _SECONDS, "SECONDS", "give up where it has not run by then"),
    ("first_token_target", _SECONDS, "SECONDS", "give up where there is no token by then"),
    ("cache_salt", text(128), "TEXT", "share cached prefixes only with requests of the same salt"),
)


def add_gateway_flags(parser: argparse.ArgumentParser) -> None:
    """Declare where the gateway is and which of its models is meant."""
    parser.add_argument(
        "--address",
        type=address,
        metavar="HOST:PORT",
        help="the gateway [default: OCTAVO_ADDRESS, else the first that serves on this machine]",
    )
    parser.add_argument("--model", metavar="NAME", help="the model, where the gateway serves several")
    add_api_key_flag(parser)


def add_api_key_flag(parser: argparse._ActionsContainer, note: str = "") -> None:
    """Declare the key. `note`: what else is to be known of it."""
    parser.add_argument(
        "--api-key",
        type=_api_key,
        metavar="KEY",
        help=f"for a gateway that asks for one{note}; other users of this machine can read a flag, not a variable "
        "[default: OCTAVO_API_KEY]",
    )


def add_admin_flags(parser: argparse.ArgumentParser) -> None:
    """Declare where the operator's API is."""
    parser.add_argument(
        "--address",
        type=address,
        metavar="HOST:PORT",
        help="a gateway's admin port [default: OCTAVO_ADMIN_ADDRESS, else the first that serves on this machine]",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_sampling_flags(parser: argparse.ArgumentParser, max_tokens: int | None = None) -> None:
    """Declare a flag for each option of sampling, stopping, scheduling and cache.

    `max_tokens`: default; None: what the context leaves.
    """
    group = parser.add_argument_group("sampling", "What is left out takes the model's own default.")
    for name, parse, metavar, meaning in _SAMPLING:
        default = None
        if name == "max_tokens":
            default = max_tokens
            meaning += f" [default: {max_tokens or 'what is left of the context'}]"
        group.add_argument(f"--{name.replace('_', '-')}", type=parse, default=default, metavar=metavar, help=meaning)
    group.add_argument(
        "--stop",
        action="append",
        type=text(_MOST_STOP_CHARACTERS),
        metavar="TEXT",
        help="stop before this text; can be given 16 times",
    )
    group.add_argument("--ignore-eos", action="store_true", default=None, help="do not stop where the model would")
    _add_scheduling_flags(parser)


def _add_scheduling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "scheduling and cache", "What is left out: in its turn, with every shared prefix."
    )
    for name, parse, metavar, meaning in _SCHEDULING:
        group.add_argument(f"--{name.replace('_', '-')}", type=parse, metavar=metavar, help=meaning)
    meaning = "take nothing from the prefix cache, leave nothing in it"
    group.add_argument("--bypass-cache", action="store_true", default=None, help=meaning)


def options_of(args: argparse.Namespace) -> GenerateOptions:
    """Return what the user gave of model, sampling, scheduling and cache, as `AsyncClient.generate` takes it."""
    names = ("model", "stop", "ignore_eos", "bypass_cache", *(name for name, *_ in (*_SAMPLING, *_SCHEDULING)))
    given = {name: getattr(args, name) for name in names}
    return {name: value for name, value in given.items() if value is not None}  # type: ignore[return-value]


def _api_key(text: str) -> str:
    try:
        return parse_api_key(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be {error}") from None


def address(text: str) -> str:
    """Return an address, for argparse."""
    try:
        return parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be {error}, is {text!r}") from None
