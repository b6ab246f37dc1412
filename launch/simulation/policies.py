"""What a job does when devices come and go: ours, and those that it is compared with."""

from collections.abc import Callable
from dataclasses import dataclass

from arachne_runtime.units import Seconds

from ..coordinator.worth import HORIZON_S, Offer, pays, samples_in
from .options import Option, Way


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What a policy knows when it decides; of the future nothing."""

    running_samples_per_s: float
    """With copies counted; 0 where the running plan has lost a node or is about to."""
    offers: tuple[tuple[Option, float], ...]
    """Each with its samples a second, copies counted; never the running plan."""
    calm_s: Seconds
    """Expected time until devices change again (``calm.Calm``)."""


Choose = Callable[[Situation], Option | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A way to change plans, and when."""

    name: str
    way: Way
    choose: Choose
    keeps_shape: bool = False
    """Whether it only ever runs its first plan, on any nodes that are alike."""
    looks_again: bool = False
    """Whether a change that did not pay is weighed again as time goes by without another change."""


def best_that_pays(situation: Situation, horizon_s: Seconds) -> Option | None:
    """Of the changes that pay, the one with most samples within the horizon."""
    offers = [(option, _offer(option, rate, situation)) for option, rate in situation.offers]
    paying = [(option, offer) for option, offer in offers if pays(offer, horizon_s)]
    best = max(paying, key=lambda each: samples_in(each[1], horizon_s), default=None)
    if best is not None:
        return best[0]
    return None if situation.running_samples_per_s else _soonest(situation)


def _offer(option: Option, samples_per_s: float, situation: Situation) -> Offer:
    return Offer(
        plan=option.plan,
        samples_per_s=samples_per_s,
        running_samples_per_s=situation.running_samples_per_s,
        migration_s=option.standstill_s,
    )


def _soonest(situation: Situation) -> Option | None:
    """Where nothing runs and no change pays within the horizon: the shortest standstill."""
    best = min(situation.offers, key=lambda o: (o[0].standstill_s, -o[1]), default=None)
    return None if best is None else best[0]


def _ours(situation: Situation) -> Option | None:
    return best_that_pays(situation, situation.calm_s)


def _within_the_horizon(situation: Situation) -> Option | None:
    return best_that_pays(situation, HORIZON_S)


def _fastest(situation: Situation) -> Option | None:
    """Whatever the change costs; among equally fast ones the cheapest change."""
    better = [o for o in situation.offers if o[1] > situation.running_samples_per_s]
    best = max(better, key=lambda o: (o[1], -o[0].standstill_s), default=None)
    return None if best is None else best[0]


def _only_when_it_must(situation: Situation) -> Option | None:
    return None if situation.running_samples_per_s else _soonest(situation)


OURS = Policy(name="ours", way=Way.LIVE, choose=_ours, looks_again=True)
FIXED_HORIZON = Policy(name="fixed horizon", way=Way.LIVE, choose=_within_the_horizon)
ALWAYS = Policy(name="always change", way=Way.LIVE, choose=_fastest)
RESTART = Policy(name="restart", way=Way.RESTART, choose=_within_the_horizon)
NEVER = Policy(name="never change", way=Way.LIVE, choose=_only_when_it_must, keeps_shape=True)

POLICIES = (OURS, FIXED_HORIZON, ALWAYS, RESTART, NEVER)
ORACLE = "oracle"
"""Not a policy: the best plan for the devices that are there at every moment, and changes take no time."""
