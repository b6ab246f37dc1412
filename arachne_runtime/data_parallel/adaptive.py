"""The global batch that follows the gradient noise: what a user asks for, and where one loader is with it."""

import logging
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ..batch import Controller, ControllerSettings, ControllerState, Decision, ScalingRule, gain, total
from ..batch.time_model import TimeModel
from ..data.order import GlobalOrder
from ..errors import NotMeasuredError, UsageError
from .link import Link, TimedSharing
from .space import is_adam

_LOG = logging.getLogger(__name__)
_MOST = 32
"""Base batches that the global batch may reach by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveBatch:
    """How far the global batch follows the gradient noise, and how the learning rate follows it.

    The ``global_batch`` of the loader is the base: the batch that the learning rate was chosen for.
    """

    least: int | None = None
    """Of the global batch; default: the base."""
    most: int | None = None
    """Of the global batch; default: 32 times the base. It is never more than the dataset has."""
    scaling: str | None = None
    """A ``ScalingRule`` or its name; default: ``adamscale`` for Adam, else ``adascale``."""
    max_accumulation: int = 1
    """Most batches of a rank in one step, where memory does not take them at once."""
    settings: ControllerSettings = field(default_factory=ControllerSettings)
    """When it may change."""

    def __post_init__(self) -> None:
        if self.scaling is not None and self.scaling not in list(ScalingRule):
            known = ", ".join(sorted(ScalingRule))
            raise UsageError(f"no scaling rule named {self.scaling!r}; known: {known}")

    def controller(self, *, base_batch: int, num_samples: int) -> Controller:
        """UsageError where the bounds leave out the base batch."""
        most = _MOST * base_batch if self.most is None else self.most
        return Controller(
            base_batch=base_batch,
            least=self.least,
            most=most if most <= base_batch else max(base_batch, min(most, num_samples)),
            rule=ScalingRule(self.scaling or ScalingRule.ADASCALE),
            max_accumulation=self.max_accumulation,
            settings=self.settings,
        )


class Adaptation:
    """The batch of one loader. What it decides it decides from numbers that all ranks have, between steps."""

    def __init__(self, asked: AdaptiveBatch, *, base_batch: int, num_samples: int) -> None:
        self._chooses_rule = asked.scaling is None
        self.controller = asked.controller(base_batch=base_batch, num_samples=num_samples)
        self._present = 0
        """Samples as which the step that was given out counts; 0: none was, or it is counted."""
        self._is_followed = False
        """Whether a learning rate follows in the present step."""
        self._num_sums = 0
        """Of gradients, in the present step."""

    def join(self, link: Link) -> None:
        """Decide the batch of ``link``; UsageError where its shares rest on no time model."""
        if not isinstance(link.sharing, TimedSharing):
            raise UsageError(
                "an adaptive batch needs shares that learn how long a step takes; leave out sharing=, or "
                "give it model(), minima and caps as arachne_runtime.batch.Balancer has them"
            )
        link.adaptation = self

    def follow(self, optimizers: Sequence[torch.optim.Optimizer], link: Link) -> None:
        """The body of a step begins, which these optimizers end: noise is that of their space."""
        if self._chooses_rule and optimizers:
            kinds = {is_adam(optimizer) for optimizer in optimizers}
            if len(kinds) > 1:
                raise UsageError(
                    "Adam and another optimizer update one model, whose learning rates follow the batch "
                    "otherwise; name one rule for both: AdaptiveBatch(scaling=...)"
                )
            self.controller.rule = ScalingRule.ADAMSCALE if kinds == {True} else ScalingRule.ADASCALE
        self._is_followed = bool(optimizers)
        for reducer in link.reducers:
            reducer.measure_noise(optimizers)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Changes of the batch since the loader was made or its state loaded, and why, oldest first."""
        return tuple(self.controller.log)

    @property
    def noise_scale(self) -> float:
        """Samples at which noise and signal are equal, averaged; infinite before it is known."""
        return self.controller.noise_scale

    # --- of the present step

    def begin(self, num_rows: int, batch: int) -> None:
        """A step of ``num_rows`` samples is given out; the last of an epoch has fewer than its ``batch``.

        A short step counts as what it has, or as one of the base batch, as it does where nothing adapts.
        """
        self._present = max(num_rows, min(batch, self.controller.base_batch))
        self._is_followed, self._num_sums = False, 0

    @property
    def lr_factor(self) -> float:
        """What learning rates are multiplied by in the present step."""
        return self.controller.lr_factor_of(self._present or self.controller.batch)

    @property
    def num_schedule_steps(self) -> int:
        """Whole steps of the base batch that end with the present step."""
        before = self.controller.progress.steps
        return math.floor(before + self._worth) - math.floor(before)

    @property
    def _worth(self) -> float:
        """Of the present step, in steps of the base batch."""
        base, noise_scale = self.controller.base_batch, self.controller.noise_scale
        return gain(self._present, base_batch=base, noise_scale=noise_scale) if self._present else 0.0

    def summed(self) -> None:
        """Gradients of the present step have been summed over the ranks."""
        self._num_sums += 1 if self._present else 0  # another loader may train the model too

    # --- between two steps

    def end(self) -> None:
        """The step that was given out is over: count it, unless it failed or was not trained on.

        Raises:
            UsageError: It was trained on outside ``loader.step``, so that no learning rate followed; or
                several times, so that it is not known whose noise to follow.

        """
        if self._num_sums and not self._is_followed and self.controller.rule is not ScalingRule.NONE:
            raise UsageError(
                "the learning rate follows an adaptive batch inside `with loader.step(optimizer):`, around "
                'the body of the loop; enter it, or set AdaptiveBatch(scaling="none") and see to it yourself'
            )
        if self._num_sums > 1:
            raise UsageError(
                f"{self._num_sums} sums of gradients in one step, of several models or backwards; an "
                "adaptive batch follows the noise of one backward of one model: "
                "arachne.HeteroDDP(model, loader=loader)"
            )
        if self._num_sums:
            self.controller.advance(self._present)
        self._present, self._num_sums = 0, 0

    def learn(self, link: Link) -> None:
        """Learn from what the last step told; decide now and then.

        Raises:
            UsageError: Another loader adapts for the same models.

        """
        if link.adaptation is not self:
            raise UsageError(
                "another loader with adaptive= was made for the same models; tell them apart: "
                "arachne.HeteroDDP(model, loader=loader)"
            )
        for reducer in link.reducers:
            if not reducer.measures_noise:
                reducer.measure_noise()
        noise, link.noise = link.noise, ()
        if not noise:
            return
        sharing = link.sharing
        assert isinstance(sharing, TimedSharing)
        decision = self.controller.observe(
            total(noise), _model(sharing), minima=sharing.minima, caps=sharing.caps
        )
        if decision is not None and link.peers.rank == 0:
            _LOG.info("%s", decision)

    # --- a checkpoint

    @property
    def state(self) -> ControllerState:
        """For a checkpoint: the present step counts once it is summed, as the loader goes on behind it."""
        found = self.controller.state
        return replace(found, progress_steps=found.progress_steps + self._worth) if self._num_sums else found

    def resume(self, state: ControllerState) -> None:
        """Go on where another one was; UsageError where its batch is out of bounds."""
        self.controller.resume(state)
        self._present, self._num_sums = 0, 0


def adaptation_of(asked: AdaptiveBatch, order: GlobalOrder, link: Link) -> Adaptation:
    """Of a new loader, at its base batch; a single rank is warned that its batch stays."""
    found = Adaptation(asked, base_batch=order.global_batch, num_samples=order.num_samples)
    found.join(link)
    if link.peers.num_ranks == 1:
        warnings.warn(
            "an adaptive batch follows the noise between ranks, and there is one rank: its batch stays",
            stacklevel=3,
        )
    return found


def _model(sharing: TimedSharing) -> TimeModel | None:
    try:
        return sharing.model()
    except NotMeasuredError:
        return None
