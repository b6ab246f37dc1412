"""Integer shares: largest remainder, and water-filling (equal finishing times)."""

from collections.abc import Sequence


def largest_remainder(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Split ``total`` in proportion to ``weights`` (positive): floors, then one each by largest remainder.

    Ties go to the lower index. Exact integer arithmetic; ``sum(result) == total``.
    """
    whole = sum(weights)
    floors = [total * w // whole for w in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % whole), i))
    for i in by_remainder[: total - sum(floors)]:
        floors[i] += 1
    return tuple(floors)
