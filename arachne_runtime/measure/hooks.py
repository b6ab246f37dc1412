"""What a session tells the times of its engines to: records of every action, and scalars for TensorBoard."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from ..plan.plan import Plan
from .board import Board, Finished
from .computed import Computed
from .recorder import Recorder, Records, Silence


@dataclass(frozen=True, slots=True)
class Hooks:
    """Opens what is asked for, for an engine of a plan and this process's rank in it."""

    trace: Path | None
    tensorboard: Path | None
    device: torch.device
    until: ExitStack
    """When all of it is closed that no engine closed at its end."""
    computed: Computed | None = None
    """Where nothing is traced, sums what this rank computes."""

    def __call__(self, plan: Plan, rank: int) -> tuple[Records, Callable[[Finished], None] | None]:
        """What the engine tells its times to, and what writes scalars of each step."""
        records: Records = self.computed or Silence()
        if self.trace is not None:
            recorder = Recorder(self.trace, rank=rank, plan=plan, device=self.device)
            records = self.until.enter_context(recorder)
        if self.tensorboard is None:
            return records, None
        board = Board(self.tensorboard, rank=rank, plan=plan, device=self.device, records=records)
        self.until.callback(board.close)
        return board, board.write
