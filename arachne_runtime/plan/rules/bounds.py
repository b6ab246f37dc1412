"""Bounds of numbers by their address, told alike in every document; None is a number that was left out."""

from collections.abc import Iterator, Mapping

from ...errors import Problem

Numbers = Mapping[str, float | None]


def at_least(least: int, numbers: Numbers) -> Iterator[Problem]:
    """Every number below ``least``."""
    for path, number in numbers.items():
        if number is not None and number < least:
            yield Problem(path, f"must be at least {least}, is {number}")


def above_zero(numbers: Numbers, way_out: str = "") -> Iterator[Problem]:
    """Every number that is 0 or negative."""
    for path, number in numbers.items():
        if number is not None and number <= 0:
            yield Problem(path, f"must be above 0, is {number}{way_out}")


def not_negative(numbers: Numbers) -> Iterator[Problem]:
    """Every negative number."""
    for path, number in numbers.items():
        if number is not None and number < 0:
            yield Problem(path, f"must not be negative, is {number}")
