"""Lists of tokens by slot."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from executor_svc.token_lists import TokenLists

_actions = st.tuples(st.integers(0, 5), st.lists(st.integers(0, 99), max_size=6, unique=True), st.booleans())


@given(actions=st.lists(_actions, max_size=30))
def test_places_name_each_slots_own(actions: list[tuple[int, list[int], bool]]) -> None:
    """However lists come and go, the places of any slots hold their own tokens and values, of no list none; growing
    keeps them.
    """
    lists, expected = TokenLists(3), {}
    lists.grow(6)
    for slot, tokens, is_put in actions:
        if is_put:
            lists.put(slot, tuple(tokens), tuple(token / 2 for token in tokens))
            expected[slot] = {token: token / 2 for token in tokens}
        else:
            lists.drop(slot)
            expected.pop(slot, None)
        assert (bool(lists), lists.slots) == (bool(expected), set(expected))
        token_ids, values, begins, ends = lists.places(np.array([5, 4, 3, 2, 1, 0, 0]))
        for each, begin, end in zip((5, 4, 3, 2, 1, 0, 0), begins.tolist(), ends.tolist(), strict=True):
            held = dict(zip(token_ids[begin:end].tolist(), values[begin:end].tolist(), strict=True))
            assert held == expected.get(each, {}) == lists.as_dict(each)
            assert lists.token_ids_of(each).tolist() == list(held)


def test_values_are_zero_unless_given() -> None:
    """A list of tokens alone has zeros for values."""
    lists = TokenLists(1)
    lists.put(0, (7, 3))
    assert lists.as_dict(0) == {7: 0.0, 3: 0.0}
