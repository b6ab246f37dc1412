"""Adapts the total batch while a model trains: larger as gradients get noisier, when it pays clearly."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import NoFeasiblePlanError, UsageError
from ..units import Seconds, format_seconds
from .goodput import BatchProblem, Choice, best_batch
from .noise import NoiseAverage, NoiseReading, NoiseState
from .scaling import Progress, ScalingRule, lr_factor
from .time_model import TimeModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """When the batch may change."""

    hysteresis: float = 0.05
    """Predicted gain of goodput below which the batch stays (uneven data parallelism, §6)."""
    max_jump: float = 2.0
    """Most by which one change multiplies or divides the batch: momentum and Adam's buffers lag behind."""
    review_steps: int = 20
    """Steps between two looks, and so the least between two changes."""
    memory_steps: float = 100.0
    """Steps over which the noise scale is averaged."""
    least_steps: int = 20
    """Readings of the noise before the first change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A change of the total batch, and why."""

    step: int
    """Readings before it; it holds from the next step on."""
    before: int
    batch: int
    accumulation: int
    noise_scale: float
    """Samples."""
    gain: float
    """Goodput that is expected, over that of the batch before; at least 1 + hysteresis unless ``forced``."""
    step_s: Seconds
    """Expected seconds of a step."""
    lr_factor: float
    """What the base learning rate is multiplied by from now on."""
    forced: bool
    """The batch before does not fit its bounds any more."""

    def __str__(self) -> str:
        why = "as it no longer fits" if self.forced else f"goodput × {self.gain:.3f}"
        return (
            f"step {self.step}: batch {self.before} → {self.batch} in {self.accumulation} micro-batches, "
            f"{why}; noise scale {self.noise_scale:.0f}, {format_seconds(self.step_s)} a step, "
            f"learning rate × {self.lr_factor:.3f}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerState:
    """Where a ``Controller`` is: plain numbers (``dataclasses.asdict``), for a checkpoint."""

    step: int
    base_batch: int
    batch: int
    accumulation: int
    progress_steps: float
    noise_scale: float | None
    """None: not known yet; formats of files have no infinite numbers."""
    noise: NoiseState


class Controller:
    """Decides the total batch from the readings of the noise and the time model.

    Pure: the same observations give the same decisions on every rank. It touches no optimizer: the caller
    multiplies its base learning rate (that of its schedule at ``progress.steps``) by ``lr_factor``.
    """

    def __init__(
        self,
        *,
        base_batch: int,
        least: int | None = None,
        most: int | None = None,
        rule: ScalingRule = ScalingRule.ADASCALE,
        max_accumulation: int = 1,
        settings: ControllerSettings | None = None,
    ) -> None:
        """Start at the batch that the learning rate was chosen for; it and 32 times it are bounds."""
        self.base_batch = base_batch
        self._least = base_batch if least is None else least
        self._most = 32 * base_batch if most is None else most
        if not 1 <= self._least <= base_batch <= self._most or max_accumulation < 1:
            raise UsageError(
                f"least {self._least}, base_batch {base_batch}, most {self._most}, max_accumulation "
                f"{max_accumulation}: 1 ≤ least ≤ base_batch ≤ most, at least 1 micro-batch"
            )
        self.rule = rule
        """How the learning rate follows."""
        self._max_accumulation = max_accumulation
        self._settings = settings or ControllerSettings()
        self._average = NoiseAverage(
            memory_steps=self._settings.memory_steps, least_steps=self._settings.least_steps
        )
        self._step, self._noise_scale = 0, math.inf
        self.batch, self.accumulation = base_batch, 1
        self.progress = Progress(base_batch)
        self.log: list[Decision] = []
        """All changes so far, oldest first."""

    @property
    def noise_scale(self) -> float:
        """The last known one, in samples; infinite before there is any."""
        return self._noise_scale

    @property
    def lr_factor(self) -> float:
        """What the base learning rate is multiplied by in a step of the present batch."""
        return self.lr_factor_of(self.batch)

    def lr_factor_of(self, batch: int) -> float:
        """What the base learning rate is multiplied by in a step of ``batch`` samples."""
        return lr_factor(self.rule, batch, base_batch=self.base_batch, noise_scale=self._noise_scale)

    @property
    def state(self) -> ControllerState:
        """For a checkpoint."""
        return ControllerState(
            step=self._step,
            base_batch=self.base_batch,
            batch=self.batch,
            accumulation=self.accumulation,
            progress_steps=self.progress.steps,
            noise_scale=self._noise_scale if math.isfinite(self._noise_scale) else None,
            noise=self._average.state,
        )

    def resume(self, state: ControllerState) -> None:
        """Go on where another one was; UsageError where its batch is out of bounds, or counts otherwise.

        The log begins anew.
        """
        if state.base_batch != self.base_batch:
            raise UsageError(
                f"progress was counted in steps of {state.base_batch} samples, here of {self.base_batch}; "
                "start with the same base batch"
            )
        if not self._least <= state.batch <= self._most:
            raise UsageError(f"the batch was {state.batch}; now it is from {self._least} to {self._most}")
        self._step = state.step
        self._noise_scale = math.inf if state.noise_scale is None else state.noise_scale
        self.batch, self.accumulation = state.batch, state.accumulation
        self.progress = Progress(self.base_batch, state.progress_steps)
        self._average.state = state.noise

    def advance(self, batch: int) -> None:
        """A step of ``batch`` samples was taken: count its progress."""
        self.progress.add(batch, noise_scale=self._noise_scale)

    def observe(
        self,
        reading: NoiseReading,
        model: TimeModel | None,
        *,
        minima: Sequence[int] | None = None,
        caps: Sequence[int | None] | None = None,
    ) -> Decision | None:
        """Learn the noise of a step, now and then decide; None: go on, always while no ``model`` is known.

        ``minima`` and ``caps`` are of a micro-batch; without caps a replica takes what ``most`` allows.
        """
        self._step += 1
        self._average.add(reading)
        self._noise_scale = self._average.noise_scale or self._noise_scale
        known = math.isfinite(self._noise_scale)
        if model is None or not known or self._step % self._settings.review_steps:
            return None
        n = len(model.replicas)
        return self._decide(
            BatchProblem(
                model=model,
                base_batch=self.base_batch,
                noise_scale=self._noise_scale,
                minima=(1,) * n if minima is None else minima,
                caps=[self._most if cap is None else cap for cap in caps or (None,) * n],
                least=max(self._least, math.ceil(self.batch / self._settings.max_jump)),
                most=min(self._most, math.floor(self.batch * self._settings.max_jump)),
                max_accumulation=self._max_accumulation,
            )
        )

    def _decide(self, problem: BatchProblem) -> Decision | None:
        try:
            present, best = self._present(problem), best_batch(problem)
        except NoFeasiblePlanError:
            return None  # memory takes no batch within bounds at once: it stays, in more micro-batches
        if present is None:
            return self._change(best, gain=math.nan)
        gain = best.goodput / present.goodput
        return self._change(best, gain) if gain > 1 + self._settings.hysteresis else None

    def _present(self, problem: BatchProblem) -> Choice | None:
        """What the present batch is worth; None where it does not fit any more."""
        minima, caps = (sum(bounds) * self.accumulation for bounds in (problem.minima, problem.caps))
        return problem.choice(self.batch, self.accumulation) if minima <= self.batch <= caps else None

    def _change(self, best: Choice, gain: float) -> Decision:
        before, self.batch, self.accumulation = self.batch, best.batch, best.accumulation
        decision = Decision(
            step=self._step,
            before=before,
            batch=best.batch,
            accumulation=best.accumulation,
            noise_scale=self._noise_scale,
            gain=gain,
            step_s=best.step_s,
            lr_factor=self.lr_factor,
            forced=math.isnan(gain),
        )
        self.log.append(decision)
        return decision
