"""How many samples fit into a rank's memory."""

_KEPT = 0.75
"""Part of a batch that is tried after the whole did not fit; two tries halve it."""


def fitting_rows(rows: int) -> int:
    """Samples to try after ``rows`` did not fit; 0: there is nothing smaller."""
    return min(int(rows * _KEPT), rows - 1) if rows > 1 else 0
