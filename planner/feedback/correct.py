"""From a profile and recorded runs to a corrected profile, and how far prices are off before and after."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from arachne_runtime.errors import ArachneError, NotMeasuredError, UsageError
from arachne_runtime.plan.profile import Profile
from arachne_runtime.units import Seconds

from ..cost.fleet import Fleet
from ..cost.tables import Tables
from .apply import corrected, sources_of
from .between import LinkFactor, StepFactor, link_factors, step_factors, with_links, with_steps
from .errors import PriceError, price_error
from .factors import Factor, factors_of
from .observe import Figure, Observation, observe, ran_shares, update_terms
from .run import Run

MOST_HELD_OUT = 16
"""Runs beyond which none is left out in turn to see what the others say of it: each time is one more fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What runs say of a profile."""

    profile: Profile
    """Corrected; each figure is marked by how sure it is."""
    factors: tuple[Factor, ...]
    links: tuple[LinkFactor, ...]
    steps: tuple[StepFactor, ...]
    report: tuple[PriceError, ...]
    """Price against each run, with the profile as it was and as it is now."""
    notes: tuple[str, ...]
    """What was left out, and which rows disagree with all others."""


def correct(profile: Profile, runs: Sequence[Run]) -> Correction:
    """Correct a profile by runs of plans of its model (docs/measuring.md, "What runs teach").

    A run that says nothing of this profile is named in the notes. Raises UsageError where none says anything.
    """
    heard: list[_Heard] = []
    notes: list[str] = []
    for run in runs:
        try:
            heard.append(_Heard.of(run, profile))
        except ArachneError as error:
            notes.append(f"{run.name}: left out: {error}")
    if not heard:
        said = "\n  ".join(notes) or "no runs"
        raise UsageError(f"nothing can be learnt for the profile of {profile.model!r}:\n  {said}")
    found = _Found.of(profile, heard)
    report = tuple(
        price_error(one.run, profile, found.profile, without)
        for one, without in zip(heard, _held_out(profile, heard), strict=True)
    )
    return Correction(
        profile=found.profile,
        factors=found.factors,
        links=found.links,
        steps=found.steps,
        report=report,
        notes=(*notes, *(note for one in heard for note in one.notes), *found.outliers),
    )


@dataclass(frozen=True, slots=True)
class _Heard:
    """One run and what it says."""

    run: Run
    tables: Tables
    rows: tuple[Observation, ...]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, run: Run, profile: Profile) -> "_Heard":
        """UsageError where it says nothing of this profile, and what the cluster's devices raise."""
        if (why := run.refusal(profile)) is not None:
            raise UsageError(why)
        tables = _tables(run, profile)
        seen = observe(run, tables)
        if not seen.rows:
            raise UsageError("; ".join(seen.notes) or "its records hold no action and no update")
        return cls(run, tables, seen.rows, seen.notes)

    def update_seconds(self) -> Iterator[tuple[Figure, Seconds]]:
        """The optimizer's step over one block of each kind on the devices that ran, as the price has it."""
        first = {block.kind: i for i, block in reversed(list(enumerate(self.tables.model.blocks)))}
        for device, tp in dict.fromkeys((row.device, row.tp) for row in self.rows):
            try:
                for block in first.values():
                    yield from update_terms(self.tables, [block], device, tp).items()
            except NotMeasuredError:  # then no price of this device's optimizer can be corrected
                continue


@dataclass(frozen=True, slots=True)
class _Found:
    """A correction without its report."""

    profile: Profile
    factors: tuple[Factor, ...]
    links: tuple[LinkFactor, ...]
    steps: tuple[StepFactor, ...]
    outliers: tuple[str, ...]

    @classmethod
    def of(cls, profile: Profile, heard: Sequence[_Heard]) -> "_Found":
        rows = [row for one in heard for row in one.rows]
        runs = [(one.run, one.tables) for one in heard]
        found = factors_of(rows, sources_of(profile))
        update_s = dict(pair for one in heard for pair in one.update_seconds())
        blocks = corrected(profile, found.by_figure, ran_shares(rows), update_s)
        links = link_factors(runs)
        linked = replace(blocks, links=tuple(with_links(profile.links, links, runs)))
        # what a step costs beside its blocks is what its messages leave
        steps = step_factors(linked, [(one.run, _tables(one.run, linked)) for one in heard])
        whole = replace(linked, steps=tuple(with_steps(profile.steps, steps)))
        return cls(whole, tuple(found.by_figure.values()), links, steps, found.outliers)


def _tables(run: Run, profile: Profile) -> Tables:
    return Tables(run.model, profile, Fleet(run.cluster, profile))


def _held_out(profile: Profile, heard: Sequence[_Heard]) -> Iterable[Profile | None]:
    """For each run the profile as all the others correct it; None where there is no other."""
    if not 1 < len(heard) <= MOST_HELD_OUT:
        return [None] * len(heard)
    return [_Found.of(profile, [other for other in heard if other is not one]).profile for one in heard]
