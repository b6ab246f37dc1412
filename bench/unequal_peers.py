"""How others share a batch, given the same time model: even, equal compute, two lines."""

import math
from collections.abc import Sequence
from dataclasses import replace

from arachne_runtime.batch import TimeModel
from arachne_runtime.plan.shares import Line, water_fill


def even(model: TimeModel, total: int, minima: Sequence[int], caps: Sequence[int]) -> tuple[int, ...]:
    """DistributedDataParallel: the same batch everywhere, as far as bounds allow."""
    return water_fill(total, [[Line(0.0, 1.0)]] * len(model.replicas), minima, caps)


def lb_bsp(model: TimeModel, total: int, minima: Sequence[int], caps: Sequence[int]) -> tuple[int, ...]:
    """LB-BSP (Chen et al., SoCC 2020): equal compute, blind to reductions; here with its exact optimum."""
    return replace(model, ready=(1.0,), reduce_s=(0.0,)).best(total, minima, caps)


def cannikin(model: TimeModel, total: int, minima: Sequence[int], caps: Sequence[int]) -> tuple[int, ...]:
    """Cannikin (arXiv 2402.05302): the first bucket's ready time γ, and all buckets but the last as one.

    Its linear system finds real shares; here they are the exact integers of its two lines.
    """
    *others, last = model.reduce_s
    two = replace(model, ready=(model.ready[0], 1.0), reduce_s=(math.fsum(others), last))
    return two.best(total, minima, caps)


def published_weights(batches: Sequence[int]) -> tuple[list[float], list[float]]:
    """Cannikin's weights of the replicas' own estimates of |G|² and of the trace, said to be the best ones.

    A⁻¹1 / (1ᵀA⁻¹1), where A stands for the covariances. Written down without the paper at hand; they behave
    as is known of them (docs/unequal-batches.md).
    """
    import numpy as np

    b, total, n = np.array(batches, float), float(sum(batches)), len(batches)
    rest = total - b
    signal = (total**2 - b[:, None] ** 2 - b**2) / (total * rest[:, None] * rest)
    trace = b[:, None] * b * (total - b[:, None] - b) / (rest[:, None] * rest)
    signal[np.diag_indices(n)] = (total + 2 * b) / (total * rest)
    trace[np.diag_indices(n)] = total * b / rest
    solved = [np.linalg.solve(matrix, np.ones(n)) for matrix in (signal, trace)]
    return tuple((one / one.sum()).tolist() for one in solved)  # type: ignore[return-value]
