"""One colour for each stage: the hue says the pipeline, hue and lightness within it the stage."""

from collections.abc import Iterator
from math import cos, radians, sin

MOST_HUES = 12
"""More pipelines than that cannot be told apart; then alike ones share a hue."""

CHROMA = 0.12
LIGHT, DARK = 0.80, 0.54
"""Lightness of a pipeline's first and last stage in OKLCH: both readable on white and on black."""

SPREAD = 0.7
"""Part of the distance to the next hue that the stages of a pipeline spread over."""

FIRST_HUE = 250.0
"""Degrees; blue."""


def stage_colour(hue: int, num_hues: int, stage: int, depth: int) -> str:
    """``#rrggbb`` of a stage of the pipeline with the hue number ``hue``."""
    at = stage / (depth - 1) if depth > 1 else 0.5
    width = 360 / max(num_hues, 3)
    degrees = FIRST_HUE + 360 * hue / max(num_hues, 1) + (at - 0.5) * width * SPREAD
    return _hex(LIGHT + (DARK - LIGHT) * at, CHROMA, degrees)


def _hex(lightness: float, chroma: float, degrees: float) -> str:
    """OKLCH to sRGB, clipped (Björn Ottosson, "A perceptual color space for image processing", 2020)."""
    a, b = chroma * cos(radians(degrees)), chroma * sin(radians(degrees))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    return "#" + "".join(f"{byte:02x}" for byte in _bytes(linear))


def _bytes(linear: tuple[float, float, float]) -> Iterator[int]:
    for value in linear:
        clipped = min(1.0, max(0.0, value))
        curved = 12.92 * clipped if clipped <= 0.0031308 else 1.055 * clipped ** (1 / 2.4) - 0.055
        yield round(255 * curved)
