"""Plays the schedule of one step on a rank: forward and backward passes, messages, and sums of gradients."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..backends.protocol import GradientSums
from ..data.batch import StepBatch
from ..measure.recorder import Records, Silence
from ..mesh import Mesh
from ..model import StageModule
from ..plan.order import Reduction
from ..plan.placement import Place
from ..plan.records import RecordKind
from .courier import Courier
from .play import Play
from .player import Player
from .precision import forget_casts
from .program import Program
from .recipe import Recipe
from .weight import weight_of

Telling = Callable[[str, int | None], AbstractContextManager[None]]
"""From where, and in which stage, to what notes it on an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What differs from one run to the next."""

    step: int
    """Steps done before it."""
    watched: bool
    """Whether blocks are run again to find what would depend on the plan."""
    scale: float
    """Factor of the losses."""
    evaluates: bool = False
    """Forward passes only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is the same in every run of an engine."""

    mesh: Mesh
    recipe: Recipe
    stages: Sequence[StageModule]
    places: Sequence[Place]
    plays: Mapping[int, Play]
    """By stage."""
    gradients: GradientSums
    records: Records
    told: Telling
    blocking: bool
    overlap: bool

    def __call__(self, program: Program, batch: StepBatch, turn: Turn) -> tuple[Tensor, int]:
        """Sum the gradients of a batch; this rank's part of the loss, and the global count."""
        forget_casts(self.mesh.device)
        courier = Courier(
            program.sequence, program.rows, rank=self.mesh.rank, device=self.mesh.device,
            transport=self.mesh.transport, reducer=self.gradients, num_rows=batch.num_rows,
            within=self._within, blocking=self.blocking, looks_ahead=self.overlap,
            forward_only=turn.evaluates,
        )  # fmt: skip
        players = {
            stage: self._player(play, courier, program, batch, turn) for stage, play in self.plays.items()
        }
        last, speaking = players[max(players)], self._speaking  # the one with a loss, if this rank has it
        counted = last.own_samples() if max(players) in speaking else ()
        weight = weight_of(
            self.recipe.num_items, counted, batch.num_rows, self.mesh, may_be_none=turn.evaluates
        )
        for action, following in zip(program.actions, (*program.actions[1:], None), strict=False):
            with self.told(str(action), action.stage):
                players[action.stage].play(action, following, weight)
        if turn.evaluates:
            courier.finish()
        else:
            self._reduce(program, courier)
        heard = [player.loss for stage, player in players.items() if stage in speaking]
        return torch.stack([last.loss.new_zeros(()), *heard]).sum(), weight.count()

    @property
    def _speaking(self) -> frozenset[int]:
        """Stages whose losses and items this rank adds to those of others: one rank of each replica does."""
        return frozenset(place.stage for place in self.places if place.tp_rank == 0)

    @property
    def _within(self) -> frozenset[int]:
        return frozenset(stage for stage in self.plays if stage + 1 in self.plays)

    def _player(self, play: Play, courier: Courier, program: Program, batch: StepBatch, turn: Turn) -> Player:
        return Player(
            play, courier, self.gradients, batch, program.rows, program.guests,
            records=Silence() if turn.evaluates else self.records, step=turn.step,
            watched=turn.watched and not turn.evaluates, scale=turn.scale,
        )  # fmt: skip

    def _reduce(self, program: Program, courier: Courier) -> None:
        """Issue the sums of gradients and wait for them."""
        start = self.records.mark()
        for stage in self.stages:
            courier.passed(stage.block_range)
        courier.finish()
        for reduction in program.sequence:
            if isinstance(reduction, Reduction):
                with self.told(f"the sum of gradients {reduction.name}", None):
                    self.gradients.finish(reduction)
                end = self.records.mark()
                sent = self.gradients.bytes_of(reduction)
                self.records.add(RecordKind.REDUCE, reduction.name, (start, end), sent_bytes=sent)
                start = end
