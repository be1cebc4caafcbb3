"""Lists of tokens by slot."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class TokenLists:
    """Lists of distinct tokens, each with a value, of some slots.

    They lie end to end in one array, laid out anew when a list came or went: a step names the places of its rows'
    lists, and copies none.
    """

    def __init__(self, capacity: int) -> None:
        self._lists: dict[int, tuple[Ints, Floats]] = {}
        self._begins = np.zeros(capacity, dtype=np.int64)
        self._ends = np.zeros(capacity, dtype=np.int64)
        self._token_ids: Ints = np.zeros(0, dtype=np.int64)
        self._values: Floats = np.zeros(0, dtype=np.float32)
        self._is_laid_out = True

    def __bool__(self) -> bool:
        """Whether any slot has a list."""
        return bool(self._lists)

    def __contains__(self, slot: int) -> bool:
        """Whether the slot has one."""
        return slot in self._lists

    @property
    def slots(self) -> set[int]:
        """Those that have one."""
        return set(self._lists)

    def put(self, slot: int, token_ids: tuple[int, ...], values: tuple[float, ...] = ()) -> None:
        """Give a slot its list; the values are 0 where none are given."""
        ids = np.array(token_ids, dtype=np.int64)
        self._lists[slot] = ids, np.array(values or np.zeros(len(ids)), dtype=np.float32)
        self._is_laid_out = False

    def drop(self, slot: int) -> None:
        """Forget a slot's list, where it has one."""
        if self._lists.pop(slot, None) is not None:
            # The array keeps it until it is laid out anew.
            self._ends[slot] = self._begins[slot]
            self._is_laid_out = False

    def grow(self, capacity: int) -> None:
        """Make room for slots up to `capacity`."""
        more = np.zeros(capacity - len(self._begins), dtype=np.int64)
        self._begins, self._ends = np.concatenate((self._begins, more)), np.concatenate((self._ends, more))

    def token_ids_of(self, slot: int) -> Ints:
        """Return a slot's tokens, none where it has no list."""
        return self._lists[slot][0] if slot in self._lists else np.zeros(0, dtype=np.int64)

    def as_dict(self, slot: int) -> dict[int, float]:
        """Return a slot's values by token."""
        if slot not in self._lists:
            return {}
        token_ids, values = self._lists[slot]
        return dict(zip(token_ids.tolist(), values.tolist(), strict=True))

    def places(self, slots: Ints) -> tuple[Ints, Floats, Ints, Ints]:
        """Return the tokens and values of all lists, [A] each, and where those of `slots` begin and end, [N] each."""
        if not self._is_laid_out:
            self._lay_out()
        return self._token_ids, self._values, self._begins[slots], self._ends[slots]

    def _lay_out(self) -> None:
        end = 0
        for slot, (token_ids, _) in self._lists.items():
            self._begins[slot] = end
            end += len(token_ids)
            self._ends[slot] = end
        none = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32))
        lists = [none, *self._lists.values()]
        self._token_ids = np.concatenate([token_ids for token_ids, _ in lists])
        self._values = np.concatenate([values for _, values in lists])
        self._is_laid_out = True
