"""Random plans, models and settings against a single process: the same losses, norms, gradients, parameters.

Each kind of cases (bench/exactness_<kind>.py) draws its own; all are trained for three steps, most of them in
float64, by SGD and by AdamW in turn, with tied embeddings, clipping, losses by items, learning-rate
schedules, blocking communication, gradients summed block by block, and batches that leave remainders.
"""

from collections import Counter
from collections.abc import Iterator

from .exactness_experts import MIXTURE
from .exactness_frame import Compared, Refused, available, compare, largest
from .exactness_halves import HALVES
from .exactness_plans import INTERLEAVED, PLAIN, ZERO_BUBBLE
from .exactness_precision import EVALUATED, FROZEN, PRECISION, TENSOR_PRECISION
from .exactness_replans import REPLANS, REPLANS_ZERO
from .exactness_tensor import TENSOR
from .exactness_zero import ZERO, ZERO_DATA_PARALLEL
from .report import Options, Result, at_least, at_most, run_bench

KINDS = (
    PLAIN,
    INTERLEAVED,
    ZERO_BUBBLE,
    HALVES,
    TENSOR,
    MIXTURE,
    FROZEN,
    EVALUATED,
    *PRECISION,
    *TENSOR_PRECISION,
    ZERO,
    ZERO_DATA_PARALLEL,
    REPLANS,
    REPLANS_ZERO,
)
WANTED = 306
"""Combinations that the rules accept; 12 with ``--quick``."""


def measure(options: Options) -> Iterator[Result]:
    kinds = available(KINDS)
    found = {kind.name: Compared(kind) for kind in kinds}
    jobs = [(kind, case) for kind in kinds for case in kind.cases(quick=options.quick)]
    for kind, case, what in compare(jobs):
        if isinstance(what, Refused):
            found[kind.name].refused[what.reason] += 1
        else:
            found[kind.name].gaps.append((case, what))
            if largest(case, what) > kind.bound_of(case):
                print(f"{kind.name}: {what} from {case}", flush=True)
    refused = sum((compared.refused for compared in found.values()), Counter[str]())
    for reason, count in sorted(refused.items()):
        print(f"refused {count} x: {reason}", flush=True)
    count = sum(len(compared.gaps) for compared in found.values())
    detail = {"refused": dict(refused), "by_kind": {name: len(c.gaps) for name, c in found.items()}}
    yield at_least("combinations-compared", count, "plans", 12 if options.quick else WANTED, **detail)
    for name, compared in found.items():
        yield from of_kind(name, compared)


def of_kind(name: str, compared: Compared) -> Iterator[Result]:
    """The largest difference by the bound that it is held to."""
    by_bound: dict[float, list[float]] = {}
    for case, gap in compared.gaps:
        by_bound.setdefault(compared.kind.bound_of(case), []).append(largest(case, gap))
    for bound, gaps in sorted(by_bound.items()):
        yield at_most(f"{name}-{bound:g}", max(gaps), "abs", bound, cases=len(gaps))


if __name__ == "__main__":
    raise SystemExit(run_bench("exactness", measure))
