"""The engine of one rank: from a plan and a model to optimizer steps that equal those of a single process."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..backends.choice import backend_for
from ..data.batch import StepBatch, as_step_batch
from ..data.loader import LoadedRows
from ..errors import UsageError
from ..measure.recorder import Records, Silence
from ..mesh import Mesh, default_device
from ..model import ModelParts, StageModule
from ..model.experts import ExpertMesh, place_experts
from ..model.parameters import Values
from ..plan.order import Reduction
from ..plan.placement import holding, places_of
from ..plan.plan import Plan
from ..plan.records import RecordKind
from ..plan.shards import Intervals, held
from .agreement import batch_number, committed, settings_number
from .compiled import backend_of, compile_blocks, refuse_compiled
from .courier import Courier
from .evaluate import Tally, evaluating
from .gradients import Gradients
from .noise import watch_noise
from .nonfinite import refuse_non_finite
from .optimizer_rule import refuse_optimizer
from .play import Play
from .player import Player
from .precision import Accumulation, LossScale, Precision, forget_casts, refuse_parameters, scale_gradients
from .program import Program
from .recipe import Recipe
from .refusals import refuse_gradient_hooks, refuse_model, refuse_plan, refuse_recipe, refuse_rows
from .report import EvaluationReport, StepReport
from .shard_rule import shard_rule_of
from .sharing import sharing_of
from .told import told
from .watch import is_watched
from .weight import weight_of

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
        self._mesh = Mesh.form(plan, self._summed, self.places[0].rank, device, processes)
        spans = [holding(plan, place)[1].blocks for place in self.places]
        shared = sharing_of(self._mesh, plan, recipe)
        self.stages = parts.stages(
            spans, device=device, seed=recipe.seed, dtype=recipe.dtype, sharing=shared, values=values
        )
        """One for each place."""
        for place, stage in zip(self.places, self.stages, strict=True):
            place_experts(stage, self._mesh.experts[place.stage])
        self._accumulation = self._prepare_dtypes()
        self.backend = backend_for(
            plan, self._mesh, self.stages, list(self._trained()), self._make_optimizer()
        )
        self._gradients = self.backend.sums or Gradients.of(self.stages, self._mesh)
        self.optimizer = self.backend.optimizer
        """None on a rank without parameters that train; under ZeRO it has this rank's part of the states."""
        self.schedule = recipe.lr_schedule(self.optimizer) if recipe.lr_schedule and self.optimizer else None
        self.num_steps = 0
        """Steps done."""
        self.first_step = 0
        """Steps done before the first one by this plan."""
        self.wants_change: Callable[[], bool] = lambda: False
        """Asked in each step whether this rank knows of another plan."""
        self.is_change_wanted = False
        """Whether any rank did in the last step: all have heard it in the same one."""
        self.scale = LossScale() if recipe.precision is Precision.FP16 else None
        """Of the losses, in float16."""
        self._noise = (
            watch_noise(plan, self._summed, self._gradients, recipe, self._mesh.rank) if noise else None
        )
        self._settings = settings_number(plan, parts, *recipe.common(), on_step is None, noise)
        context = parts.context_on(device, recipe.dtype)
        self._plays = {
            place.stage: Play.of(
                plan, place, recipe, stage, pieces=self._pieces(stage), device=device, context=context,
                sharing=each, shard_rule=shard_rule_of(parts, stage, each),
            )
            for place, stage, each in zip(self.places, self.stages, shared, strict=True)
        }  # fmt: skip
        self._splits = any(play.splits for play in self._plays.values())
        self._speaking = frozenset(place.stage for place in self.places if place.tp_rank == 0)
        """Stages whose losses and items this rank adds to those of others: one rank of each replica does."""
        self._within = frozenset(stage for stage in self._plays if stage + 1 in self._plays)
        self._records: Records = recorder or Silence()
        self.after_step: list[Callable[[StepReport, StepBatch], None]] = []
        """Called in turn when a step is done, on every rank; what they do is between two steps."""
        self._on_step = on_step
        self._is_open = True
        self._program = lru_cache(KEPT_PROGRAMS)(
            lambda num_rows: Program.of(plan, self.places, num_rows, self._summed)
        )

    def _prepare_dtypes(self) -> Accumulation:
        """What must be before gradients are packed and the first block is called."""
        refuse_parameters(self.recipe.precision, self.named_parameters())
        backend = backend_of(self.recipe.compile)
        refuse_compiled(self.plan, backend)
        if backend is not None:
            for stage in self.stages:
                compile_blocks(stage, backend)
        return Accumulation.of(self.recipe.accumulate, (p for _, p in self.named_parameters()))

    def _make_optimizer(self) -> torch.optim.Optimizer | None:
        recipe, parameters = self.recipe, [p for _, p in self._trained()]
        if not parameters:
            return None
        made = recipe.optimizer(parameters)
        refuse_optimizer(made, recipe.optimizer, parameters[0], self.plan, stochastic=recipe.stochastic)
        return made

    def _pieces(self, stage: StageModule) -> tuple[range, ...]:
        return self._gradients.pieces(stage) if self._overlap else (stage.block_range,)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Global name and parameter of all that this rank holds, by block; those that blocks share last."""
        for stage in self.stages:
            for block in stage.block_range:
                yield from stage.block_parameters(block)
        yield from {name: p for stage in self.stages for name, p in stage.tied_parameters()}.items()

    def whole_parameters(self) -> AbstractContextManager[None]:
        """Inside, parameters can be read whole (always without ZeRO-3); all ranks enter it together."""
        return self.backend.whole()

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.named_parameters() if p.requires_grad)

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

    def close(self) -> None:
        """Destroy the process groups that the engine made, and let go of the others; it cannot step any more.

        Threads of a group that anything still holds outlive it. One that lets go of a tensor while the
        interpreter ends aborts it: "terminate called without an active exception" (torch 2.13, gloo).
        """
        self._is_open = False
        for stage in self.stages:
            place_experts(stage, ExpertMesh())
        self.backend.close()
        self._gradients.close()
        self._mesh.close()

    def beside(self, plan: Plan, **given: Any) -> "Engine":
        """Another engine of the same training, by another plan; ``given`` as to this class."""
        return Engine(
            plan, self.parts, self.recipe, device=self.device, blocking=self._blocking,
            overlap=self._overlap, noise=self._noise is not None, **given,
        )  # fmt: skip

    def become(self, other: "Engine") -> None:
        """Go on by the plan of another engine, which was given this one's state and is used no more."""
        self.close()
        own = {name: vars(self)[name] for name in ("after_step", "wants_change", "is_change_wanted")}
        vars(self).update(vars(other) | own)

    def step(self, batch: Any) -> StepReport:
        """Forward, backward, reduction and optimizer step on one global batch.

        Args:
            batch: A ``StepBatch``, or a tree of tensors that holds the whole global batch, rows first.

        Raises:
            UsageError: No rows, or more than the plan's global batch.

        """
        self._refuse_closed()
        if not torch.is_grad_enabled():
            raise UsageError("a step trains, but gradients are off here: take it outside torch.no_grad()")
        start = time.perf_counter()
        batch = as_step_batch(batch)
        refuse_rows(batch.num_rows, self.plan)
        with self._records.step(self.num_steps, samples=batch.num_rows, held=self._held):
            self._gradients.begin()
            refuse_gradient_hooks(self._gradients.parameters, splits=self._splits)
            self._accumulation.begin()
            part, count = self._run(self._program(batch.num_rows), batch)
            with self._told("the commit word"):
                loss, norm, trace = self._commit(part, batch)
                skipped, scale = self._skips(loss, norm), self._loss_scale
            if not skipped:
                with self._told("the optimizer step"):
                    self._update(norm)
        if self.scale is not None:
            self.scale.update(finite=not skipped)
        self.num_steps += 1
        report = StepReport(
            step=self.num_steps - 1, loss=loss, grad_norm=norm, num_rows=batch.num_rows, num_items=count,
            seconds=time.perf_counter() - start, skipped=skipped, loss_scale=scale,
            noise=self._noise.reading(trace, norm, batch.num_rows) if self._noise else None,
        )  # fmt: skip
        if self._on_step is not None:
            self._on_step(report)
        for tell in self.after_step:
            tell(report, batch)
        return report

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
        self._refuse_closed()
        start, tally = time.perf_counter(), Tally.on(self._mesh.device)
        with evaluating(self.stages):
            for given in batches:
                batch = as_step_batch(given)
                if batch.num_rows:
                    refuse_rows(batch.num_rows, self.plan)
                    program = self._program(batch.num_rows).forwards()
                    loss, count = self._run(program, batch, evaluates=True)
                    tally.add(loss, batch.num_rows, count, batch_number(batch))
            with self._told("the end of an evaluation"):
                mean = tally.mean(self._mesh, self._settings)
        return EvaluationReport(
            loss=mean, num_samples=tally.num_samples, num_items=tally.num_items,
            num_batches=tally.num_batches, seconds=time.perf_counter() - start,
        )  # fmt: skip

    def _run(self, program: Program, batch: StepBatch, *, evaluates: bool = False) -> tuple[Tensor, int]:
        """Play the schedule and sum the gradients; this rank's part of the loss, and the global count."""
        forget_casts(self._mesh.device)
        records = Silence() if evaluates else self._records
        courier = Courier(
            program.sequence, program.rows, rank=self._mesh.rank, device=self._mesh.device,
            transport=self._mesh.transport, reducer=self._gradients, num_rows=batch.num_rows,
            within=self._within, blocking=self._blocking, looks_ahead=self._overlap, forward_only=evaluates,
        )  # fmt: skip
        watched = is_watched(self.num_steps - self.first_step) and not evaluates
        players = {
            stage: Player(
                play, courier, self._gradients, batch, program.rows, program.guests,
                records=records, step=self.num_steps, watched=watched, scale=self._loss_scale,
            )
            for stage, play in self._plays.items()
        }  # fmt: skip
        last = players[max(players)]  # the one with a loss, if this rank has it
        counted = last.own_samples() if max(players) in self._speaking else ()
        weight = weight_of(self.recipe.num_items, counted, batch.num_rows, self._mesh, may_be_none=evaluates)
        for action, following in zip(program.actions, (*program.actions[1:], None), strict=False):
            with self._told(str(action), action.stage):
                players[action.stage].play(action, following, weight)
        if evaluates:
            courier.finish()
        else:
            self._reduce(program, courier)
        heard = [player.loss for stage, player in players.items() if stage in self._speaking]
        return torch.stack([last.loss.new_zeros(()), *heard]).sum(), weight.count()

    def _reduce(self, program: Program, courier: Courier) -> None:
        """Issue the sums of gradients and wait for them."""
        start = self._records.mark()
        for stage in self.stages:
            courier.passed(stage.block_range)
        courier.finish()
        for reduction in program.sequence:
            if isinstance(reduction, Reduction):
                with self._told(f"the sum of gradients {reduction.name}"):
                    self._gradients.finish(reduction)
                end = self._records.mark()
                sent = self._gradients.bytes_of(reduction)
                self._records.add(RecordKind.REDUCE, reduction.name, (start, end), sent_bytes=sent)
                start = end

    def _commit(self, loss: Tensor, batch: StepBatch) -> tuple[float, float, float]:
        """The commit word: all ranks have their sums and agree on the step. Global loss, norm and noise."""
        watched = is_watched(self.num_steps - self.first_step)  # whole batches are read seldom
        content = batch_number(batch) if watched or isinstance(batch, LoadedRows) else 0
        same = (self.num_steps, batch.num_rows, self._settings, content)
        noise = self._noise.part(batch.num_rows) if self._noise else 0.0
        mine = (loss.item(), self._gradients.squared_norm(), noise, self.wants_change())
        total, squares, noise, self.is_change_wanted = committed(mine, same, self._mesh, self._records)
        norm = math.sqrt(squares) if squares >= 0 else math.nan
        return total, norm / self._loss_scale, noise / self._loss_scale**2

    @property
    def _loss_scale(self) -> float:
        return 1.0 if self.scale is None else self.scale.value

    def _skips(self, loss: float, norm: float) -> bool:
        """Whether the step is to leave parameters alone; NonFiniteGradientError where no scale would help."""
        if math.isfinite(norm):
            return False
        if self.scale is None or self.scale.is_lost:
            refuse_non_finite(self.plan, self._summed, self._mesh, self.stages, loss)
        return self.scale is not None

    def _update(self, norm: float) -> None:
        start = self._records.mark()
        if self.scale is not None:
            scale_gradients(self._gradients.parameters, 1 / self.scale.value)
        if self.recipe.clip_norm is not None:
            self._gradients.clip(norm, self.recipe.clip_norm)
        self._accumulation.round()
        self.backend.step()
        if self.schedule is not None:
            self.schedule.step()
        self._records.add(RecordKind.UPDATE, "update", (start, start, self._records.mark()))

    def _refuse_closed(self) -> None:
        if not self._is_open:
            raise UsageError("the engine is closed, since its session has ended; train in its `with` block")

    def _told(self, where: str, stage: int | None = None) -> AbstractContextManager[None]:
        return told(self.places, where, self.num_steps, stage)
