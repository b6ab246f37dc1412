"""One random problem with everything that training asks of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import overload

from arachne_runtime.plan.plan import ScheduleKind
from arachne_runtime.units import Seconds

from ..policy.choosers import forced
from ..policy.roll import Rollouts, roll
from ..policy.site import Site
from ..request import Request
from ..search.columns import Completion
from ..search.supply import Supply
from .draw import drawn
from .labels import Labels, TemplateSequence
from .sequences import copies_of

MOST_HELD = 128
"""Problems kept at once with their tables; to draw one again takes some 0.03 s."""


@dataclass
class Problem:
    """A request, what long searches found for it, and what is computed from both when first asked for."""

    request: Request
    seed: int
    sequences: tuple[TemplateSequence, ...]
    """Good ones, best first by a long search."""
    relative: tuple[float, ...]
    """Their seconds over those of the first."""
    best_s: Seconds
    """Iteration of the best plan that such a search found."""

    @classmethod
    def of(cls, labels: Labels) -> "Problem":
        """Drawn again from its seed; labels of a problem with a plan."""
        return cls.labelled(drawn(labels.problems, labels.seed, labels.space).request, labels)

    @classmethod
    def labelled(cls, request: Request, labels: Labels) -> "Problem":
        """A request, and what is known of it."""
        assert labels.best_s is not None
        return cls(request, labels.seed, labels.sequences, labels.relative, labels.best_s)

    @cached_property
    def supply(self) -> Supply:
        """What its cluster offers."""
        return Supply.of(self.request)

    @cached_property
    def site(self) -> Site:
        """As the policy sees it."""
        return Site.of(self.request, self.supply)

    @cached_property
    def completion(self) -> Completion:
        """Of pipelines under 1F1B, which every label is for."""
        return Completion(self.request, self.supply, ScheduleKind.ONE_F_ONE_B)

    @cached_property
    def lessons(self) -> list[tuple[TemplateSequence, float]]:
        """Sequences that the policy can say, with their relative seconds: it has fewer runs than a search."""
        every = list(zip(self.sequences, self.relative, strict=True))
        return [(sequence, relative) for sequence, relative in every if self.can_say(sequence)]

    def rollouts(self, sequences: Sequence[TemplateSequence]) -> Rollouts:
        """The sequences as if they had been sampled; UsageError where the policy cannot say one."""
        return roll(self.site, len(sequences), forced(self.site, sequences))

    def can_say(self, sequence: TemplateSequence) -> bool:
        """Whether the policy's masks leave a way to it."""
        return copies_of(self.site, sequence) is not None


class Problems(Sequence[Problem]):
    """Labelled problems, each drawn when it is looked at; the latest ones are kept."""

    def __init__(self, labels: Sequence[Labels]) -> None:
        self._labels = labels
        self._drawn = lru_cache(MOST_HELD)(lambda k: Problem.of(labels[k]))

    def __len__(self) -> int:
        return len(self._labels)

    @overload
    def __getitem__(self, index: int) -> Problem: ...

    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...

    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        if isinstance(index, slice):
            return [self._drawn(k) for k in range(len(self))[index]]
        return self._drawn(range(len(self))[index])
