"""A strategy's own ranking: the first of it that fit are priced, and the price picks among them."""

from collections.abc import Callable, Hashable

from arachne_runtime.errors import NotMeasuredError
from arachne_runtime.plan.plan import Plan
from arachne_runtime.units import Seconds

from ..cost import Estimate, price
from .site import Site
from .strategy import Clock

MOST_KEPT = 4000
"""Candidates that are remembered; the worse half goes when there are twice as many."""

PATIENCE = 64
"""Plans that are priced in a row without a better one before the rest of the ranking is left."""

FIRST_OF_FAMILY = 2
"""Of candidates that differ in little, how many are priced before all others get their turn."""

SEARCH_PART = 0.6
"""Part of a budget in which a strategy ranks; in the rest the price looks at the best of them."""


class Shortlist:
    """Candidates by their cost in the strategy's own eyes, each drawn as a plan only when its turn comes."""

    def __init__(self, site: Site, clock: Clock, patience: int = PATIENCE) -> None:
        self.site = site
        self.clock = clock
        self.patience = patience
        self._price_s = clock.budget_s * (1 - SEARCH_PART)
        self._entries: list[tuple[Seconds, int, Hashable, Callable[[], Plan | None]]] = []
        self._serial = 0
        self.least_s = float("inf")
        """Cost of the best candidate so far."""

    @property
    def closed(self) -> bool:
        """Whether the time for ranking is over."""
        return self.clock.left_s <= self._price_s

    @property
    def half_closed(self) -> bool:
        """Whether half of the time for ranking is over."""
        return self.clock.left_s <= (self.clock.budget_s + self._price_s) / 2

    def add(self, cost_s: Seconds, draw: Callable[[], Plan | None], family: Hashable = None) -> None:
        """A candidate; of equals the first comes first. A family's best few go before all others of it."""
        self._serial += 1
        self.least_s = min(self.least_s, cost_s)
        self._entries.append((cost_s, self._serial, family, draw))
        if len(self._entries) >= 2 * MOST_KEPT:
            self._entries = sorted(self._entries, key=lambda e: e[:2])[:MOST_KEPT]

    def _in_turn(self) -> list[Callable[[], Plan | None]]:
        """By cost, the first few of each family before the others."""
        seen: dict[Hashable, int] = {}
        first: list[Callable[[], Plan | None]] = []
        later: list[Callable[[], Plan | None]] = []
        for _, serial, family, draw in sorted(self._entries, key=lambda e: e[:2]):
            here = serial if family is None else family
            seen[here] = seen.get(here, 0) + 1
            (first if seen[here] <= FIRST_OF_FAMILY else later).append(draw)
        return first + later

    def best(self) -> Plan | None:
        """The fastest under the price, until ``patience`` in a row are no better; None: none fits in time.

        Raises NotMeasuredError where none fits and some reach beyond the profile.
        """
        found: tuple[Seconds, Plan] | None = None
        priced: set[Plan] = set()
        vain = 0
        beyond = self.site.beyond
        for draw in self._in_turn():
            if self.clock.over or vain >= self.patience:
                break
            plan = draw()
            if plan is None or plan in priced:
                continue
            try:
                outcome = price(plan, self.site.request)
            except NotMeasuredError as error:
                beyond = beyond or error
                continue
            if isinstance(outcome, Estimate):
                priced.add(plan)
                vain += 1
                if found is None or outcome.iteration_s < found[0]:
                    found, vain = (outcome.iteration_s, plan), 0
        if found is None and beyond is not None:
            raise beyond
        return found[1] if found else None
