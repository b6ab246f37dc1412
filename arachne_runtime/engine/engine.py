"""The engine of one rank: from a plan and a model to optimizer steps that equal those of a single process."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..data.batch import StepBatch, as_step_batch
from ..data.loader import LoadedRows
from ..errors import UsageError
from ..measure.recorder import Records, Silence
from ..mesh import Mesh, default_device
from ..model import ModelParts
from ..model.experts import ExpertMesh, place_experts
from ..model.parameters import Values
from ..plan.placement import places_of
from ..plan.plan import Plan
from ..plan.records import RecordKind
from ..plan.shards import Intervals, held
from ..units import Seconds
from .agreement import added, batch_number, committed, settings_number
from .build import Built, named_parameters
from .evaluate import Tally, evaluating
from .noise import watch_noise
from .nonfinite import refuse_non_finite
from .open_step import OpenStep
from .precision import LossScale, Precision, scale_gradients
from .program import Program
from .recipe import Recipe
from .refusals import refuse_gradient_hooks, refuse_model, refuse_plan, refuse_recipe, refuse_rows
from .report import EvaluationReport, StepReport
from .run import Run, Turn
from .survival import Survival
from .told import told
from .watch import is_watched

KEPT_PROGRAMS = 8
"""Batch sizes whose order of communication is remembered: the full one and the last of an epoch recur."""


class Engine:
    """Trains the stages of one rank; every rank calls ``step`` with the same batches.

    That is one stage, or several where the plan is interleaved.

    Args:
        plan: The plan; its devices are the ranks of the default process group, in the order of the plan.
        parts: The model.
        recipe: How it is trained.
        device: Where the stage lives; default: CUDA device by the plan's index if there is CUDA, else CPU.
        recorder: Writes down how long each action took.
        on_step: Told of each finished step, on every rank.
        blocking: End each communication before the next is issued, to find errors in their order.
        overlap: Without it sums of gradients start when the whole stage has its own, and nothing is asked
            for before its turn in the total order: what benchmarks compare with.
        noise: Measure the gradient noise of every step; UnsupportedPlanError where it is not seen.
        processes: By rank of the plan, the number of its process in the default group; default: its rank.
        values: Gives the parameters, in place of first values.
        form_s: How long a group may take to form, and wait; default: what the default group has.

    Raises:
        UsageError: The number of ranks, or of blocks, is not the plan's; an optimizer that needs a closure.
        UnsupportedPlanError: A plan, model or optimizer that cannot be run exactly.

    """

    def __init__(
        self,
        plan: Plan,
        parts: ModelParts,
        recipe: Recipe,
        *,
        device: torch.device | None = None,
        recorder: Records | None = None,
        on_step: Callable[[StepReport], None] | None = None,
        blocking: bool = False,
        overlap: bool = True,
        noise: bool = False,
        processes: Sequence[int] | None = None,
        values: Values | None = None,
        form_s: Seconds | None = None,
    ) -> None:
        distributed = dist.is_initialized()
        refuse_plan(plan, dist.get_world_size() if distributed else 1)
        refuse_model(plan, parts, stochastic=recipe.stochastic)
        refuse_recipe(plan, recipe)
        self.plan = plan
        self._blocking, self._overlap = blocking, overlap
        self.recipe = recipe
        here = dist.get_rank() if distributed else 0
        self.places = places_of(plan, here if processes is None else processes.index(here))
        """Of this rank, by stage."""
        self.device = device = device or default_device(self.places[0].device)
        self.parts = parts
        self._summed = parts.summed()
        self.forms = self._summed.forms
        """Of the parameters of each block, whole."""
        self._mesh = Mesh.form(plan, self._summed, self.places[0].rank, device, processes, timeout_s=form_s)
        with ExitStack() as undo:
            undo.callback(self._mesh.close)
            built = Built.of(
                plan, parts, recipe, self._mesh, device=device, values=values, overlap=overlap, undo=undo
            )
            self._gradients = built.gradients
            self._noise = (
                watch_noise(plan, self._summed, self._gradients, recipe, self._mesh.rank) if noise else None
            )
            self.optimizer = built.backend.optimizer
            """None on a rank without parameters that train; under ZeRO it has this rank's part of them."""
            self.schedule = (
                recipe.lr_schedule(self.optimizer) if recipe.lr_schedule and self.optimizer else None
            )
            undo.pop_all()
        self.stages = built.stages
        """One for each place."""
        self.backend, self._accumulation, self._plays = built.backend, built.accumulation, built.plays
        self._splits = any(play.splits for play in self._plays.values())
        self._records: Records = recorder or Silence()
        self._run = Run(
            mesh=self._mesh, recipe=recipe, stages=self.stages, places=self.places, plays=self._plays,
            gradients=self._gradients, records=self._records, told=self._told, blocking=blocking,
            overlap=overlap,
        )  # fmt: skip
        self.num_steps = 0
        """Steps done."""
        self.first_step = 0
        """Steps done before the first one by this plan."""
        self.open: OpenStep | None = None
        """The step whose sums are there; done or not, until the sums of the next one begin."""
        self.wants_change: Callable[[], bool] = lambda: False
        """Asked in each step whether this rank knows of another plan."""
        self.is_change_wanted = False
        """Whether any rank did in the last step: all have heard it in the same one."""
        self.scale = LossScale() if recipe.precision is Precision.FP16 else None
        """Of the losses, in float16."""
        self._settings = settings_number(plan, parts, *recipe.common(), on_step is None, noise)
        self.survival: Survival | None = None
        """Takes the steps over in a job that outlives its ranks."""
        self.on_applied: list[Callable[[StepReport, StepBatch], None]] = []
        """Called in turn as soon as a step is applied; they ask nothing of other ranks."""
        self.after_step: list[Callable[[StepReport, StepBatch], None]] = []
        """Called behind those, on every rank; what they do is between two steps, and may be together. One
        that a lost rank cuts short is not repeated."""
        self._on_step = on_step
        self._is_open = True
        places, summed = self.places, self._summed
        self._program = lru_cache(KEPT_PROGRAMS)(lambda num_rows: Program.of(plan, places, num_rows, summed))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Global name and parameter of all that this rank holds, by block; those that blocks share last."""
        return named_parameters(self.stages)

    def whole_parameters(self) -> AbstractContextManager[None]:
        """Inside, parameters can be read whole (always without ZeRO-3); all ranks enter it together."""
        return self.backend.whole()

    def _held(self) -> Iterator[Tensor]:
        """All that lives from step to step: weights, buffers, gradients, states of the optimizer."""
        for stage in self.stages:
            yield from chain(stage.parameters(), stage.buffers())
        yield from self._gradients.kept()
        yield from self.backend.kept()

    def held_parts(self) -> dict[str, tuple[Intervals, ...]]:
        """What this rank holds of each whole parameter, by dim; by the names of ``named_parameters``."""
        return {
            form.tie or form.name: held(form, position)
            for block, position in self._mesh.positions.items()
            for form in self._summed.forms[block]
        }

    def needed_rows(self, num_rows: int) -> tuple[range, ...]:
        """Rows of a global batch of ``num_rows`` rows that this rank reads, ascending; often none."""
        needed = any(play.needs_samples for play in self._plays.values())
        return tuple(rows for rows in self._program(num_rows).rows if rows) if needed else ()

    def every_group(self) -> tuple[dist.ProcessGroup, ...]:
        """All groups that this rank communicates on, each once."""
        return self._mesh.every_group()

    def close(self) -> None:
        """Destroy the process groups that the engine made, let go of the others, close what it records to.

        It cannot step any more.

        Threads of a group that anything still holds outlive it. One that lets go of a tensor while the
        interpreter ends aborts it: "terminate called without an active exception" (torch 2.13, gloo).
        """
        self._is_open = False
        for stage in self.stages:
            place_experts(stage, ExpertMesh())
        self.backend.close()
        self._gradients.close()
        self._mesh.close()
        self._records.close()

    def beside(self, plan: Plan, **given: Any) -> "Engine":
        """Another engine of the same training, by another plan; ``given`` as to this class."""
        return Engine(
            plan, self.parts, self.recipe, device=self.device, blocking=self._blocking,
            overlap=self._overlap, noise=self._noise is not None, **given,
        )  # fmt: skip

    def become(self, other: "Engine") -> None:
        """Go on by the plan of another engine, which was given this one's state and is used no more."""
        self.close()
        own = ("on_applied", "after_step", "wants_change", "is_change_wanted", "survival", "open")
        vars(self).update(vars(other) | {name: vars(self)[name] for name in own})
        self._run = replace(other._run, told=self._told)
        vars(other).clear()  # it is in cycles, and would hold this state beyond the next change

    def step(self, batch: Any) -> StepReport:
        """Forward, backward, reduction and optimizer step on one global batch.

        Args:
            batch: A ``StepBatch``, or a tree of tensors that holds the whole global batch, rows first.

        Raises:
            UsageError: No rows, or more than the plan's global batch.

        """
        return self.step_once(batch) if self.survival is None else self.survival.step(self, batch)

    def step_once(self, batch: Any) -> StepReport:
        """As ``step``, in one try, whoever takes steps over."""
        self._refuse_closed()
        if not torch.is_grad_enabled():
            raise UsageError("a step trains, but gradients are off here: take it outside torch.no_grad()")
        start = time.perf_counter()
        batch = as_step_batch(batch)
        refuse_rows(batch.num_rows, self.plan)
        with self._records.step(self.num_steps, samples=batch.num_rows, held=self._held):
            opened = self._reduced(batch, start)
            with self._told("the commit word"):
                self._agree(opened)
            self._update(opened)
        report = self._applied(opened)
        if self._on_step is not None:
            self._on_step(report)
        for tell in self.after_step:
            tell(report, batch)
        return report

    def apply_open(self) -> StepReport:
        """End the step that is open, whose sums are here, without a word to other ranks.

        ``after_step`` is not called. A step that is applied already stays as it is.
        """
        opened = self.open
        assert opened is not None, "no step is open"
        if opened.number == self.num_steps:
            opened.refuse_begun()
            self._update(opened)
            return self._applied(opened)
        return self._report(opened)

    def discard(self) -> None:
        """Forget the step that is open: it will be computed again."""
        self.open = None

    def evaluate(self, batches: Iterable[Any]) -> EvaluationReport:
        """The loss over some batches, without training on them; every rank calls it, with the same batches.

        Blocks are in eval mode meanwhile, without gradients; afterwards every module is in the mode
        that it had. Forward passes go through the stages of the plan as in a step. A batch may have fewer
        samples than the plan's, or none.

        Args:
            batches: Each as for ``step``: ``session.batches(dataset, global_batch, shuffle=False)``.

        Raises:
            UsageError: More samples than the plan's global batch; no samples at all.

        """
        return self.evaluate_once(batches) if self.survival is None else self.survival.evaluate(self, batches)

    def evaluate_once(self, batches: Iterable[Any]) -> EvaluationReport:
        """As ``evaluate``, in one try."""
        self._refuse_closed()
        start, tally = time.perf_counter(), Tally.on(self._mesh.device)
        with evaluating(self.stages):
            for given in batches:
                batch = as_step_batch(given)
                if batch.num_rows:
                    refuse_rows(batch.num_rows, self.plan)
                    program = self._program(batch.num_rows).forwards()
                    turn = Turn(step=self.num_steps, watched=False, scale=1.0, evaluates=True)
                    loss, count = self._run(program, batch, turn)
                    tally.add(loss, batch.num_rows, count, batch_number(batch))
            with self._told("the end of an evaluation"):
                mean = tally.mean(self._mesh, self._settings)
        return EvaluationReport(
            loss=mean, num_samples=tally.num_samples, num_items=tally.num_items,
            num_batches=tally.num_batches, seconds=time.perf_counter() - start,
        )  # fmt: skip

    def _reduced(self, batch: StepBatch, start_s: Seconds) -> OpenStep:
        """(1) of a step: forward, backward, and all sums."""
        self.open = None
        self._gradients.begin()
        refuse_gradient_hooks(self._gradients.parameters, splits=self._splits)
        self._accumulation.begin()
        turn = Turn(step=self.num_steps, watched=self._watches, scale=self._loss_scale)
        part, count = self._run(self._program(batch.num_rows), batch, turn)
        content = batch_number(batch) if self._watches or isinstance(batch, LoadedRows) else 0
        opened = OpenStep(
            number=self.num_steps, batch=batch, count=count, scale=self._loss_scale, start_s=start_s,
            same=(self.num_steps, batch.num_rows, self._settings, content),
            generation=self.survival.generation if self.survival else 0, loss=part.item(),
            norm=self._gradients.squared_norm(),
            trace=self._noise.part(batch.num_rows) if self._noise else 0.0,
        )  # fmt: skip
        if self.survival is not None:
            with self._told("the sum of loss and norm"):
                self._hear(opened, *added(opened.figures, opened.same, self._mesh))
        self.open = opened
        return opened

    def _agree(self, opened: OpenStep) -> None:
        """(2): the commit word. All ranks have their sums and agree on the step.

        Loss and norm go with it, unless a rank may have to end the step without the others: those it must
        have had before.
        """
        alone = self.survival is None
        mine = (*(opened.figures if alone else (0.0, 0.0, 0.0)), self.wants_change())
        loss, squares, trace, opened.wants_change = committed(mine, opened.same, self._mesh, self._records)
        opened.is_agreed, self.is_change_wanted = True, opened.wants_change
        if alone:
            self._hear(opened, loss, squares, trace)

    def _hear(self, opened: OpenStep, loss: float, squares: float, trace: float) -> None:
        """What all ranks have added up; NonFiniteGradientError where no scale would help."""
        norm = math.sqrt(squares) if squares >= 0 else math.nan
        opened.loss, opened.norm, opened.trace = loss, norm / opened.scale, trace / opened.scale**2
        if not math.isfinite(norm):
            if self.scale is None or self.scale.is_lost:
                refuse_non_finite(self.plan, self._summed, self._mesh, self.stages, loss)
            opened.skipped = self.scale is not None

    def _update(self, opened: OpenStep) -> None:
        """(3), the optimizer step, which changes gradients in place: it is done once."""
        if opened.skipped:
            return
        opened.is_begun = True
        with self._told("the optimizer step"):
            start = self._records.mark()
            if self.scale is not None:
                scale_gradients(self._gradients.parameters, 1 / self.scale.value)
            if self.recipe.clip_norm is not None:
                self._gradients.clip(opened.norm, self.recipe.clip_norm)
            self._accumulation.round()
            self.backend.step()
            if self.schedule is not None:
                self.schedule.step()
            self._records.add(RecordKind.UPDATE, "update", (start, start, self._records.mark()))

    def _applied(self, opened: OpenStep) -> StepReport:
        """The step counts."""
        if self.scale is not None:
            self.scale.update(finite=not opened.skipped)
        self.num_steps += 1
        report = self._report(opened)
        for tell in self.on_applied:
            tell(report, opened.batch)
        return report

    def _report(self, opened: OpenStep) -> StepReport:
        num_rows, noise = opened.batch.num_rows, self._noise
        return StepReport(
            step=opened.number, loss=opened.loss, grad_norm=opened.norm, num_rows=num_rows,
            num_items=opened.count, seconds=time.perf_counter() - opened.start_s, skipped=opened.skipped,
            loss_scale=opened.scale,
            noise=noise.reading(opened.trace, opened.norm, num_rows) if noise else None,
        )  # fmt: skip

    @property
    def _watches(self) -> bool:
        """Whether this step is one of those that look closely; whole batches are read in them alone."""
        return is_watched(self.num_steps - self.first_step)

    @property
    def _loss_scale(self) -> float:
        return 1.0 if self.scale is None else self.scale.value

    def _refuse_closed(self) -> None:
        if not self._is_open:
            raise UsageError("the engine is closed, since its session has ended; train in its `with` block")

    def _told(self, where: str, stage: int | None = None) -> AbstractContextManager[None]:
        return told(self.places, where, self.num_steps, stage)
