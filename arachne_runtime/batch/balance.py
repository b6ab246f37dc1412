"""Shares of the replicas, step by step: even, then such that the time model is learnt, then the best ones.

The same readings give the same shares on every rank: no clock, no random numbers, and no arithmetic whose
bits depend on the machine (see ``lines``).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ..errors import NotMeasuredError, UsageError
from ..plan.shares import Line, water_fill
from ..units import Seconds
from .buckets import Reading, check_readings
from .explore import nudged
from .learner import Learner
from .state import BalancerState
from .time_model import TimeModel

__all__ = ["BalanceSettings", "Balancer", "Phase", "Reading"]

_DOUBT = 0.2
"""Relative deviation of a replica's slope from which on its line is badly determined."""
_NUDGES_IN_NOISE, _LEAST_NUDGE, _MOST_NUDGE = 4.0, 0.05, 0.25
"""Fraction of a share by which it is moved to learn its line, in deviations of a reading; bounds of it: four
readings of each of two shares that far apart tell the slope to ``_DOUBT``."""
_MOST_DOUBT = 0.1
"""Fraction of a step beyond which doubt holds nothing back: nor is it known that all is well."""
_RARELY = (2.0, 2.5)
"""Square of the deviations that a gain over even shares must pass, and more of it each time the replicas
double: the slowest of equal ones is later than that beside their mean in 1 to 5 of 1,000 looks (2 to 64
replicas, Monte Carlo)."""
_NUM_HELD = 16
"""Sizes of batch whose present shares are remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceSettings:
    """How quickly shares move. Judged by regret in simulation: docs/unequal-batches.md."""

    warmup_steps: int = 2
    """Readings that are left out at first and after a change of buckets (DDP builds them anew)."""
    explore_steps: int = 4
    """Readings of each split while lines are being learnt."""
    max_explorations: int = 4
    """Splits that are tried for the sake of learning, the first proportional one included."""
    review_steps: int = 4
    """Readings between two looks at the shares; after a drift twice as many are looked at singly."""
    min_gain: float = 0.005
    """Predicted saving of a step, as a fraction, below which shares stay."""
    memory: float = 64.0
    """Readings after which one counts a third of what it did, where newer ones tell the same."""
    revisit_steps: int = 500
    """Readings after which a replica that takes no samples is tried again."""


class Phase(StrEnum):
    """What the present shares are for."""

    EVEN = "even"
    EXPLORE = "explore"
    BALANCED = "balanced"


class Balancer:
    """Learns the time model of a group of replicas from their readings and says the next step's shares.

    Only ``observe`` and ``limit`` change what ``shares`` answers. Call these in the same order on every rank.
    """

    def __init__(
        self,
        *,
        num_replicas: int,
        minima: Sequence[int] | None = None,
        caps: Sequence[int] | None = None,
        settings: BalanceSettings | None = None,
    ) -> None:
        """Without ``minima`` each replica takes at least one sample; a minimum of 0 may leave it out."""
        self._minima = tuple(minima) if minima is not None else (1,) * num_replicas
        self._caps: list[int | None] = list(caps) if caps is not None else [None] * num_replicas
        if num_replicas < 1 or not len(self._minima) == len(self._caps) == num_replicas:
            raise UsageError(
                f"{num_replicas} replicas, {len(self._minima)} minima and {len(self._caps)} caps; "
                "at least one replica, and one minimum and cap of each"
            )
        self._n, self._settings = num_replicas, settings or BalanceSettings()
        self._learner = Learner(
            num_replicas, memory=self._settings.memory, warmup_steps=self._settings.warmup_steps
        )
        self._phase, self._steps_in_phase, self._explorations = Phase.EVEN, 0, 0
        self._trial: tuple[int, ...] = ()
        self._alert = 0  # readings still to be looked at one by one
        self._held: dict[int, tuple[int, ...]] = {}
        self._model: TimeModel | None = None
        self._answers: dict[int, tuple[int, ...]] = {}

    @property
    def phase(self) -> Phase:
        """What the present shares are for."""
        return self._phase

    @property
    def caps(self) -> tuple[int | None, ...]:
        """The most samples of each replica, as far as known."""
        return tuple(self._caps)

    @property
    def minima(self) -> tuple[int, ...]:
        """The least samples of each replica."""
        return self._minima

    @property
    def state(self) -> BalancerState:
        """For a checkpoint."""
        return BalancerState(
            caps=self.caps,
            phase=self._phase,
            steps_in_phase=self._steps_in_phase,
            explorations=self._explorations,
            trial=self._trial,
            alert=self._alert,
            held=tuple(self._held.values()),
            answers=tuple(self._answers.values()),
            model=self._model,
            learner=self._learner.state,
        )

    def resume(self, state: BalancerState) -> None:
        """Go on where another one was; UsageError for one of other replicas."""
        if len(state.caps) != self._n:
            raise UsageError(
                f"the state is of {len(state.caps)} replicas, these are {self._n}: what was learnt of those "
                "does not tell how quick these are; start without it"
            )
        self._caps, self._phase = list(state.caps), Phase(state.phase)
        self._steps_in_phase, self._explorations = state.steps_in_phase, state.explorations
        self._trial, self._alert = state.trial, state.alert
        self._held = {sum(shares): shares for shares in state.held}
        self._answers = {sum(shares): shares for shares in state.answers}
        self._model = state.model
        self._learner.resume(state.learner)

    def observe(self, readings: Sequence[Reading]) -> None:
        """Learn from one step; UsageError for readings that cannot be."""
        check_readings(readings, self._n)
        if not self._learner.observe(readings):
            return
        samples = tuple(one.samples for one in readings)
        self._steps_in_phase += 1
        if self._phase is Phase.BALANCED:
            self._follow(samples)
        elif self._steps_in_phase >= self._settings.explore_steps:
            self._review()
            self._explore(samples)

    def shares(self, global_batch: int) -> tuple[int, ...]:
        """Samples of each replica in the next step.

        Raises NoFeasiblePlanError where the caps together are smaller than ``global_batch``. Minima are let
        go where the batch (the last one of an epoch) is smaller than they are together.
        """
        bounds = self._bounds(global_batch)
        if self._trial and sum(self._trial) == global_batch and _within(self._trial, *bounds):
            return self._trial
        if global_batch not in self._answers:
            self._answers[global_batch] = self._answer(global_batch, *bounds)
        return self._answers[global_batch]

    def limit(self, replica: int, cap: int) -> None:
        """A replica can take at most ``cap`` samples (it ran out of memory with more)."""
        if not 0 <= replica < self._n or cap < 0:
            raise UsageError(f"replica {replica} of {self._n} cannot be limited to {cap} samples")
        known = self._caps[replica]
        self._caps[replica] = cap if known is None else min(known, cap)
        self._answers = {}

    def model(self) -> TimeModel:
        """The time model as last reviewed; NotMeasuredError before there is one."""
        if self._model is None:
            raise NotMeasuredError("no time model yet: too few steps were observed")
        return self._model

    def lines(self) -> tuple[tuple[Line, ...], ...]:
        """K lines a replica, the highest of which is its time; NotMeasuredError before there are any."""
        return self.model().lines()

    def predicted_s(self, shares: Sequence[int]) -> Seconds:
        """Seconds of a step with these shares; NotMeasuredError before there is a model."""
        return self.model().step_s(shares)

    def _bounds(self, total: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        minima = self._minima if total >= sum(self._minima) else (0,) * self._n
        return minima, tuple(total if cap is None else cap for cap in self._caps)

    def _answer(self, total: int, minima: tuple[int, ...], caps: tuple[int, ...]) -> tuple[int, ...]:
        """The best shares; the present ones where the predicted gain is small or in doubt.

        Even ones where it is not sure that replicas differ, as in most groups they do not.
        """
        even = water_fill(total, [[Line(0.0, 1.0)]] * self._n, minima, caps)
        if self._model is None:
            return even
        best = self._model.best(total, minima, caps)
        held = self._held.get(total, even)
        surely = _surely(self._n) if held == even else _surely(self._n) / 2  # else they would come and go
        if best == even or not self._gains(best, even, surely):
            return even
        return held if _within(held, minima, caps) and not self._gains(best, held, 1.0) else best

    def _gains(self, shares: tuple[int, ...], over: tuple[int, ...], deviations: float) -> bool:
        """Whether a step is shorter by more than the least gain and its doubt."""
        over_s = self.predicted_s(over)
        least = self._settings.min_gain + deviations * min(self._learner.doubt_s(over) / over_s, _MOST_DOUBT)
        return self.predicted_s(shares) < (1 - least) * over_s

    def _review(self) -> None:
        self._model, self._answers = self._learner.model(), {}

    def _follow(self, samples: tuple[int, ...]) -> None:
        """Balanced: look again now and then, at once after a drift; try those again that were left out."""
        self._held.pop(sum(samples), None)
        self._held[sum(samples)] = samples
        if len(self._held) > _NUM_HELD:
            del self._held[next(iter(self._held))]
        self._alert = 2 * self._settings.review_steps if self._learner.drifted else max(self._alert - 1, 0)
        if self._alert or self._steps_in_phase % self._settings.review_steps == 0:
            self._review()
        if self._steps_in_phase % self._settings.revisit_steps == 0 and 0 in samples:
            self._try([i for i, share in enumerate(samples) if not share], samples, turn=0)

    def _explore(self, samples: tuple[int, ...]) -> None:
        """After a split was measured: the proportional one, then those that settle doubtful lines."""
        total = sum(samples)
        best = self._answer(total, *self._bounds(total))
        turn, self._explorations = self._explorations, self._explorations + 1
        self._enter(Phase.BALANCED, ())
        if turn >= self._settings.max_explorations:
            return
        if turn == 0 and best != samples:
            self._enter(Phase.EXPLORE, best)
            return
        doubts = self._learner.slope_doubts(best)
        self._try([i for i, doubt in enumerate(doubts) if doubt > _DOUBT], best, turn=turn)

    def _try(self, doubtful: Sequence[int], shares: tuple[int, ...], *, turn: int) -> None:
        size = min(max(_NUDGES_IN_NOISE * self._learner.noise, _LEAST_NUDGE), _MOST_NUDGE)
        trial = nudged(shares, doubtful, *self._bounds(sum(shares)), turn=turn, size=size)
        if trial != shares:
            self._enter(Phase.EXPLORE, trial)

    def _enter(self, phase: Phase, trial: tuple[int, ...]) -> None:
        self._phase, self._trial, self._steps_in_phase = phase, trial, 0


def _surely(num_replicas: int) -> float:
    """Deviations of a gain over even shares from which on replicas differ, see ``_RARELY``."""
    base, more = _RARELY
    return math.sqrt(base + more * (num_replicas - 1).bit_length())


def _within(shares: Sequence[int], minima: Sequence[int], caps: Sequence[int]) -> bool:
    return all(low <= share <= high for low, share, high in zip(minima, shares, caps, strict=True))
