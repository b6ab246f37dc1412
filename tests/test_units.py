"""Numbers as a person reads them."""

import pytest

from arachne_runtime.units import format_bytes, format_seconds, significant


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1.2345, "1.234"), (40.4527, "40.45"), (2928.4, "2928"), (16610.4, "16610"), (0, "0")],
)
def test_rates_have_no_exponent(value, expected):
    assert significant(value, 4) == expected


def test_large_units_have_no_exponent():
    assert format_seconds(4321.0) == "4321 s"
    assert format_bytes(1023 * 2**20) == "1023 MiB"
    assert format_seconds(1.2345) == "1.23 s"
