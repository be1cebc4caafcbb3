"""Length classes."""

from __future__ import annotations

from scheduler_svc.length_class import CLASS_BOUNDS, NUM_CLASSES, SHORT, length_class


def test_a_bound_belongs_to_the_class_below_it() -> None:
    """Each bound is the longest of its class; one token more is the next class, and nothing is past the last."""
    assert length_class(1) == SHORT
    for number, bound in enumerate(CLASS_BOUNDS):
        assert (length_class(bound), length_class(bound + 1)) == (number, number + 1)
    assert length_class(10**9) == NUM_CLASSES - 1
