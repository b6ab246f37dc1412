"""The frame of bench.exactness: kinds of cases, each trained by its plan and plainly by one process.

A module ``bench/exactness_<kind>.py`` draws cases (a plan, a model, settings) and offers them as ``Kind``
objects; ``bench/exactness.py`` lists them. A case that the rules refuse counts as refused, with the reason.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import groupby
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from arachne_runtime.errors import UnsupportedPlanError
from arachne_runtime.plan.plan import Plan
from arachne_runtime.plan.runnable import obstacles
from arachne_runtime.testing import run_ranks

from .cases import Case, Gap, Outcome, gap, train_by_plan, train_plainly

BOUNDS: Mapping[torch.dtype, float] = MappingProxyType({torch.float64: 1e-9, torch.float32: 1e-5})
"""Largest absolute difference by the dtype of the parameters (design.md §5.1)."""
TIMEOUT_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Cases of one sort."""

    name: str
    draw: Callable[[random.Random, int], Case]
    """From a source of random numbers and an index: a case, or a subclass with more settings."""
    full: int
    """How many are drawn."""
    quick: int
    """How many with ``--quick``."""
    by_plan: Callable[[Case], Outcome] = train_by_plan
    """Runs on every rank of the default process group."""
    plainly: Callable[[Case], Outcome] = train_plainly
    """One process that knows no plan."""
    bound: float | None = None
    """Largest difference of a loss, norm or gradient; default: by the dtype of the case."""
    needs: str = ""
    """A module without which none can run."""

    def cases(self, *, quick: bool, seed: int = 2026) -> list[Case]:
        """The same ones each time."""
        source = random.Random(f"{self.name}:{seed}")
        return [self.draw(source, index) for index in range(self.quick if quick else self.full)]

    def bound_of(self, case: Case) -> float:
        """Largest difference that counts as rounding."""
        return self.bound if self.bound is not None else BOUNDS[case.dtype]


def random_settings(
    source: random.Random,
    plan: Plan,
    index: int,
    *,
    single_share: int,
    blocking: float = 0.4,
    scheduled: float | None = None,
) -> dict[str, Any]:
    """Fields of a case that any plan may have; the optimizer alternates.

    Args:
        source: Of random numbers.
        plan: What the case trains by.
        index: Of the case.
        single_share: One case in so many is trained in float32.
        blocking: Part of the cases whose communication blocks.
        scheduled: Part that has a learning-rate schedule; None: none, and no number is drawn for it.

    """
    single = index % single_share == single_share - 1
    return {
        "plan": plan,
        "tied": source.random() < 0.6,
        "adam": index % 2 == 0,
        "dtype": torch.float32 if single else torch.float64,
        "clip_norm": source.choice((None, 0.1, 100.0)),
        "by_items": source.random() < 0.4,
        "scheduled": scheduled is not None and source.random() < scheduled,
        "rows": (*(source.randint(1, plan.global_batch) for _ in range(2)), plan.global_batch),
        "blocking": source.random() < blocking,
        "in_pieces": source.random() < 0.4,
    }


@dataclass(frozen=True)
class Refused:
    """Why a rank does not run a case."""

    reason: str


@dataclass
class Compared:
    """What was found of one kind."""

    kind: Kind
    gaps: list[tuple[Case, Gap]] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)


Job: TypeAlias = tuple[Kind, Case]


def compare(jobs: Sequence[Job]) -> Iterator[tuple[Kind, Case, Gap | Refused]]:
    """Train each case both ways; the largest gap over its ranks."""
    playable = []
    for kind, case in jobs:
        if reasons := obstacles(case.plan):
            yield kind, case, Refused(reasons[0])
        else:
            playable.append((kind, case))
    playable.sort(key=_num_ranks)
    for num_ranks, group in groupby(playable, key=_num_ranks):
        alike = list(group)
        found = run_ranks(num_ranks, train_all, alike, timeout_s=TIMEOUT_S)
        for (kind, case), outcomes in zip(alike, zip(*found, strict=True), strict=True):
            refused = next((outcome for outcome in outcomes if isinstance(outcome, Refused)), None)
            yield kind, case, refused or _widest(case, outcomes, kind.plainly(case))


def train_all(jobs: Sequence[Job]) -> list[Outcome | Refused]:
    """Several cases one after the other, on the same ranks."""
    return [_train(kind, case) for kind, case in jobs]


def largest(case: Case, found: Gap) -> float:
    """Of what must agree: AdamW makes steps of rounding, so its parameters count in float64 only."""
    counts = not case.adam or case.dtype is torch.float64
    return max(found.loss, found.norm, found.gradient, found.parameter if counts else 0.0)


def available(kinds: Sequence[Kind]) -> list[Kind]:
    """Those whose module is installed; says which are left out."""
    missing = [kind for kind in kinds if kind.needs and find_spec(kind.needs) is None]
    for kind in missing:
        print(f"{kind.name}: left out, since {kind.needs} is not installed", flush=True)
    return [kind for kind in kinds if kind not in missing]


def _num_ranks(job: Job) -> int:
    return len(job[1].plan.devices)


def _train(kind: Kind, case: Case) -> Outcome | Refused:
    """Every rank refuses alike, before it communicates."""
    try:
        return kind.by_plan(case)
    except UnsupportedPlanError as error:
        return Refused(str(error))


def _widest(case: Case, outcomes: Sequence[Outcome | Refused], wanted: Outcome) -> Gap:
    gaps = [gap(outcome, wanted) for outcome in outcomes if isinstance(outcome, Outcome)]
    assert len(gaps) == len(case.plan.devices)
    names = ("loss", "norm", "parameter", "gradient")
    return Gap(**{name: max(getattr(found, name) for found in gaps) for name in names})
