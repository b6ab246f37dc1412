"""The body of a training loop as one step: batches in rounds, and a repetition after an out-of-memory."""

import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from types import TracebackType
from typing import Any

import torch

from ..errors import UsageError, WorkerFailedError
from .adaptive import Adaptation
from .link import Link
from .memory import fitting_rows
from .pace import paced, replaced

_ONCE = ("step", "unscale_", "update")
"""Methods of optimizers, learning-rate schedules and gradient scalers that act once a step; between rounds
there are no gradients that ``zero_grad`` could clear."""


class StepBody:
    """What ``loader.step`` gives: enter it around the body of the loop."""

    def __init__(self, link: Link, actors: Sequence[Any], adaptation: Adaptation | None = None) -> None:
        self._link = link
        self._actors = actors
        self._adaptation = adaptation
        self._muted = ExitStack()

    def __enter__(self) -> None:
        if self._link.turn is None:
            raise UsageError(
                "loader.step is entered inside `for batch in loader:`, around what uses the batch"
            )
        if self._adaptation is not None:
            optimizers = [one for one in self._actors if isinstance(one, torch.optim.Optimizer)]
            self._adaptation.follow(optimizers, self._link)
        self._link.repeats = True
        for actor in self._actors:
            if self._adaptation is not None:
                self._muted.enter_context(paced(actor, self._adaptation))
            self._muted.enter_context(replaced(actor, _ONCE, partial(_when, self._acts)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._muted.close()
        try:
            if isinstance(error, torch.OutOfMemoryError):
                traceback.clear_frames(trace)  # they hold what the forward has kept
                self._join(error)
                return True
        finally:
            self._link.repeats = False
        return False

    def _acts(self) -> bool:
        """Whether an optimizer may act now: after the last round, unless the step has failed somewhere."""
        turn = self._link.turn
        return turn is not None and turn.is_last and not self._link.failures

    def _join(self, error: BaseException) -> None:
        """Take part in what the other ranks still do in this step.

        Raises:
            WorkerFailedError: The step is summed already, or which model it trains is not known.

        """
        reducers = self._link.reducers
        if self._link.num_sums or len(reducers) != 1:
            why = (
                "after the gradients were summed, so other ranks have taken the step"
                if self._link.num_sums
                else f"and {len(reducers)} models train here, so it is not known whose sums to join"
            )
            raise WorkerFailedError(
                f"rank {self._link.peers.rank} ran out of memory {why}; lower global_batch, or give the "
                "optimizer less to keep"
            ) from error
        turn = self._link.turn
        assert turn is not None
        reducers[0].abandon(fitting_rows(turn.rows, reducers[0].memory))


def _when(acts: Callable[[], bool], method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def called(*values: Any, **named: Any) -> Any:
        return method(*values, **named) if acts() else None

    return called
