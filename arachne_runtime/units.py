"""Units of measure, as types and as text."""

from typing import TypeAlias

Bytes: TypeAlias = int
Seconds: TypeAlias = float

GIB = 2**30
GB = 10**9
HOUR_S: Seconds = 3600.0


def format_seconds(seconds: Seconds) -> str:
    """Three significant digits in the unit a person would choose: ``1.23 s``, ``45.6 ms``, ``7.89 µs``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= scale:
            return f"{significant(seconds / scale)} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0 s"


def format_bytes(count: float) -> str:
    """Three significant digits in binary units: ``1.5 GiB``, ``20 MiB``."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= scale:
            return f"{significant(count / scale)} {unit}"
    return f"{count:.0f} B"


def significant(value: float, digits: int = 3) -> str:
    """Rounded to that many digits, large numbers to whole ones: ``1.23``, ``16610``; no ``1.661e+04``."""
    return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:.0f}"
