"""Every Hugging Face family staged over unequal ranks, against the original module in one process.

Each is trained by three plans of three ranks (replicas with unequal shares and recomputation before a longer
stage; three unequal stages; a pipeline beside a rank that holds the whole model) and by two that are tensor
parallel (TP 2 beside TP 1 before TP 2; TP 4 with two heads of k and v); those with experts also by EP 2 and
by parts of each expert. With clipping, by SGD and in float64 by AdamW too, on batches with and without
padding, in float64 and in float32. Wanted are the loss that the original returns, the norm of its gradients
and, with SGD, its parameters.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, product

import torch

from arachne_runtime.testing import run_ranks

from .huggingface import (
    Trained,
    Training,
    configs,
    gap,
    more_devices_than_heads,
    shared_experts,
    three_stages,
    train_all_by_plan,
    train_originally,
    two_pipelines,
    unequal_degrees,
    unequal_plan,
)
from .report import Options, Result, at_least, at_most, run_bench

PLANS = (unequal_plan, three_stages, two_pipelines, unequal_degrees, more_devices_than_heads, shared_experts)
BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-5}
"""In float64 too, since the originals compute norms, softmax and loss in float32 (rounding 6e-8)."""
GROWTH = 5
"""AdamW's steps depend on the sign of gradients that are nearly 0: norms drift further apart than losses."""


def measure(options: Options) -> Iterator[Result]:
    dtypes = (torch.float64,) if options.quick else tuple(BOUNDS)
    trainings = list(all_trainings(dtypes, num_steps=3 if options.quick else 6))
    found = by_plan(trainings)
    yield at_least("trainings-compared", len(found), "trainings", bound=140)
    for family, dtype in product(configs(), dtypes):
        apart = [
            gap(rank, wanted, adam=training.adam)
            for training, ranks in found
            if (training.family, training.dtype) == (family, dtype)
            for wanted in [train_originally(training)]
            for rank in ranks
        ]
        name, bound = f"{family}-{str(dtype).removeprefix('torch.')}", BOUNDS[dtype]
        yield at_most(f"{name}-loss", max(g.loss for g in apart), "relative", bound=bound)
        yield at_most(f"{name}-norm", max(g.norm for g in apart), "relative", bound=GROWTH * bound)
        yield at_most(f"{name}-sgd-parameters", max(g.parameter for g in apart), "abs", bound=bound)


def by_plan(trainings: Sequence[Training]) -> list[tuple[Training, tuple[Trained, ...]]]:
    """What each rank found, for each training; those of equally many ranks in one go."""
    found: list[tuple[Training, tuple[Trained, ...]]] = []
    ordered = sorted(trainings, key=lambda training: len(training.plan.devices))
    for num_ranks, group in groupby(ordered, key=lambda training: len(training.plan.devices)):
        alike = list(group)
        ranks = run_ranks(num_ranks, train_all_by_plan, alike, timeout_s=3 * 3600)
        found += zip(alike, zip(*ranks, strict=True), strict=True)
    return found


def all_trainings(dtypes: Sequence[torch.dtype], num_steps: int) -> Iterator[Training]:
    """All combinations."""
    plans, both = [plan() for plan in PLANS], (True, False)
    for family, plan, dtype, padded, adam in product(configs(), plans, dtypes, both, both):
        if plan == shared_experts() and family not in ("mixtral", "qwen3_moe"):
            continue
        if (
            adam and dtype is torch.float32
        ):  # OPT split by hand, without an engine, is 4e-5 off after six steps
            continue
        yield Training(
            family=family, plan=plan, dtype=dtype, padded=padded, adam=adam, steps=num_steps, clip_norm=0.5
        )


if __name__ == "__main__":
    raise SystemExit(run_bench("models", measure))
