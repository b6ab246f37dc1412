"""Who takes part in a contest: the policy, its rivals, and what is left of it without one of its parts."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from bench.learned_records import ENUMERATION, LEARNED, RANDOM, RANKED, TOGETHER, UNIFORM, USUAL
from planner.policy import Learned, Policy, UniformRandom
from planner.search import Enumeration, Source, Step, Uniform

IMITATED, IMPROVED, PLAIN = "imitation only", "with policy gradient", "without FiLM"
UNMASKED = "without masks"
UNPACKED, UNREFINED = "without pack", "without refine"
VARIANTS = (IMITATED, IMPROVED, PLAIN, UNMASKED, UNPACKED, UNREFINED)

WEIGHTS = Path(__file__).parent / "data" / "learned"
"""Weights of variants, made from the shipped ones' training run by `bench.learned_variants`."""

FILES = {IMITATED: "imitation.npz", IMPROVED: "policy-gradient.npz", PLAIN: "without-film.npz"}

BRIEF_MARK = 100
"""Evaluations up to which variants are compared."""

MANY_BATCHES = 64
"""Of samples: enough for a thousand shapes wherever there are as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """One way to search."""

    name: str
    sources: tuple[Source, ...] | None
    """Where templates come from; None: the usual ones with the policy among them."""
    counted: Source | None = None
    """Its proposals without end, where evaluations are counted."""
    fine: bool = False
    """Whether it is looked at often."""
    brief: bool = False
    """Whether what comes after ``BRIEF_MARK`` evaluations, or in other than ``SHORT_S``, is left out."""
    drawn: bool = True
    """Whether it depends on the seed."""
    steps: tuple[Step, ...] = tuple(Step)

    @property
    def packed(self) -> bool:
        """Whether unlike pipelines are mixed."""
        return Step.PACK in self.steps


def contestants() -> list[Contestant]:
    """The policy and its rivals."""
    ranked = UniformRandom(ranked=True)
    return [
        _learned(LEARNED, Policy.load()),
        Contestant(name=RANDOM, sources=(UniformRandom(),), counted=UniformRandom(num_batches=MANY_BATCHES)),
        Contestant(name=ENUMERATION, sources=(Enumeration(),), counted=Enumeration(), drawn=False),
        Contestant(name=UNIFORM, sources=(Uniform(),), counted=Uniform(), drawn=False),
        Contestant(name=RANKED, sources=(ranked,), counted=replace(ranked, num_batches=MANY_BATCHES)),
        Contestant(name=USUAL, sources=(Enumeration(), Uniform()), drawn=False),
        Contestant(name=TOGETHER, sources=None),
    ]


def variants() -> Iterator[Contestant]:
    """The policy without one part each; those whose weights there are."""
    for name, file in FILES.items():
        if (WEIGHTS / file).is_file():
            yield _learned(name, Policy.load(WEIGHTS / file), brief=True)
    policy = Policy.load()
    yield _learned(UNMASKED, policy, masked=False, brief=True)
    yield _learned(UNPACKED, policy, steps=(Step.REFINE,), brief=True)
    yield _learned(UNREFINED, policy, steps=(Step.PACK,), brief=True)


def _learned(
    name: str,
    policy: Policy,
    *,
    masked: bool = True,
    steps: tuple[Step, ...] = tuple(Step),
    brief: bool = False,
) -> Contestant:
    usual = Learned(policy, masked=masked)
    endless = Learned(policy, masked=masked, temperatures=usual.temperatures * (MANY_BATCHES // 2))
    counted = endless if Step.REFINE in steps else None  # evaluations are counted without refinement anyway
    return Contestant(name=name, sources=(usual,), counted=counted, fine=True, brief=brief, steps=steps)


@cache
def every_source() -> tuple[Source, ...]:
    """For a long refinement."""
    return Learned(Policy.load()), Enumeration(), UniformRandom()
