"""What a training script holds: the plan, the ranks, and an engine made from them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a group is made, which its functions would keep as a default
from torch import nn
from torch.utils.data import Dataset

from .batches import batches_of
from .data import LoaderSettings, StepBatch, default_inputs
from .elastic.joining import end, finish, survivor_of
from .elastic.survivor import Survivor
from .engine import Engine, Recipe
from .engine.precision import Precision
from .engine.recipe import Inputs, Loss, Optimizers, Schedule
from .engine.told import annotate
from .errors import UsageError
from .making import EngineMaker
from .measure.computed import Computed
from .measure.hooks import Hooks
from .membership.messages import Record
from .model import ModelParts
from .plan.files import read_plan
from .plan.placement import rank_order
from .plan.plan import Plan
from .state.changes import PlanChange, PlanChanges, PlanFile
from .state.feeds import Feeds
from .state.keeper import Checkpoints, Policy
from .surroundings import Elastic, Surroundings, lone_plan, plan_and_device
from .units import Seconds

DEFAULT_TIMEOUT_S: Seconds = 600.0
"""How long a collective may wait for the other ranks; a first step may compile and read much."""


class Session:
    """One training job as this rank sees it; use it as a context manager.

        with arachne.Session() as session:
            engine = session.engine(
                lambda: GPT(config), optimizer=lambda p: torch.optim.AdamW(p, lr=3e-4), loss=loss_fn
            )
            for batch in session.batches(dataset, global_batch=512, seed=0):
                report = engine.step(batch)
                session.print(report.step, report.loss)

    The same script runs under ``arachne run plan.json -- train.py`` (plan and ranks come from the launcher),
    under ``torchrun`` with ``Session("plan.json")``, and alone without a plan: then one process trains the
    whole model.

    Args:
        plan: A plan, or its file; default: the launcher's.
        device: Where this rank computes; default: the CUDA device with the plan's index, or the CPU where
            there is no CUDA.
        trace: Folder for the records of every action, ``rank-<r>.jsonl``; default: the launcher's, or none.
        tensorboard: Folder in which rank 0 writes loss, gradient norm, speed and each stage's part of waiting
            for TensorBoard; default: the launcher's, or none.
        timeout_s: How long a collective may wait for the other ranks.

    Raises:
        InvalidFileError: The plan's file has faults.
        UsageError: The number of processes is not the number of the plan's devices.
        UnsupportedEnvironmentError: This machine lacks the plan's CUDA device.

    """

    def __init__(
        self,
        plan: Plan | Path | str | None = None,
        *,
        device: torch.device | str | None = None,
        trace: Path | str | None = None,
        tensorboard: Path | str | None = None,
        timeout_s: Seconds = DEFAULT_TIMEOUT_S,
    ) -> None:
        around = Surroundings.here()
        self._elastic = around.elastic
        self._rank, self._world_size = around.rank, around.world_size
        self.plan, self.device = plan_and_device(plan, device, around)
        """No plan: for a lone process without one, and in an elastic job, until its engine is made."""
        self._open = ExitStack()
        self._hooks = Hooks(
            Path(trace) if trace is not None else around.trace,
            Path(tensorboard) if tensorboard is not None else around.tensorboard,
            self.device,
            self._open,
            Computed() if self._elastic is not None else None,
        )
        if not isinstance(timeout_s, int | float) or not timeout_s > 0:
            raise UsageError(f"timeout_s={timeout_s!r} is no time to wait; give seconds, above 0")
        self._timeout_s = timeout_s
        self._is_planless = self.plan is None
        self._engine: Engine | None = None
        """The one that was made last: what ``batches`` loads rows for."""
        self._changes: PlanChanges | None = None
        """Of that engine."""
        self._survivor: Survivor | None = None
        """Of an elastic job."""
        self._engines: list[Engine] = []
        self._entered = False
        self._failed = False
        self._feeds = Feeds()
        self._checkpoints: Checkpoints | None = None

    @property
    def rank(self) -> int:
        """Of this process, from 0; in an elastic job it changes as the plan does."""
        return self._known(self._rank)

    @property
    def world_size(self) -> int:
        """Number of the job's processes; likewise."""
        return self._known(self._world_size)

    def _known(self, number: int) -> int:
        if self._elastic is not None and self._engine is None:
            raise UsageError(
                "in an elastic job ranks are numbered when there is a plan: call session.engine(...) before"
            )
        return number

    def __enter__(self) -> "Session":
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self._world_size > 1 and self._elastic is None and not dist.is_initialized():
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=self._timeout_s))
            self._open.callback(self._end_group)
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._open:
            self._entered = False
            self._failed = True
            if self._checkpoints is not None:
                self._checkpoints.close(failed=error is not None)
            if error is not None:
                annotate(error, self.plan, self._rank, self._engine)
                end(error, self._survivor, self._checkpoints)
                return
            self._failed = False
            if self._survivor is not None:
                finish(self._survivor, self._checkpoints)
            elif self._world_size > 1:
                # a group that goes while another rank still receives fails that rank
                dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)
            for engine in self._engines:
                engine.close()

    def _end_group(self) -> None:
        """NCCL would first wait for what a failed step has under way, with ranks that wait for this one."""
        if self._failed and self.device.type == "cuda":
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()

    def engine(
        self,
        model: Callable[[], nn.Module] | ModelParts,
        *,
        optimizer: Optimizers,
        loss: Loss,
        inputs: Inputs = default_inputs,
        clip_norm: float | None = None,
        lr_schedule: Callable[[torch.optim.Optimizer], Schedule] | None = None,
        num_items: Callable[[Any], int] | None = None,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        precision: Precision | str | None = None,
        accumulate: torch.dtype | None = None,
        compile: bool | str = False,
        stochastic: bool = False,
        overlap: bool = True,
        noise: bool = False,
    ) -> Engine:
        """Build this rank's blocks and what trains them; every rank calls it, with the same arguments.

        Args:
            model: Constructs a class marked with ``pipelined``, or an ``nn.Sequential``; only this rank's
                blocks are allocated.
            optimizer: Makes the optimizer from this rank's parameters: ``lambda p: torch.optim.AdamW(p)``.
            loss: ``loss(output, batch)``: the mean over the samples it is given (a sum with ``num_items``).
            inputs: What the first block is called with, from a batch; default: its first item, or its
                ``inputs``, ``input_ids`` or ``x``.
            clip_norm: Clip gradients to this norm, taken over the whole model.
            lr_schedule: Makes a learning-rate schedule from the optimizer; it steps once a step.
            num_items: Counts the items (tokens) of a batch; the loss is then divided by the global count.
            seed: First values of the parameters follow from it and from nothing else, whatever the plan.
            dtype: Dtype of parameters and floating-point buffers; default: the model's own.
            precision: ``"bf16"`` or ``"fp16"``: blocks and loss run under autocast, parameters, gradients and
                optimizer states stay float32. With ``"fp16"`` losses are scaled, by one factor for the whole
                job; a step whose gradients overflow is skipped on every rank.
            accumulate: ``torch.float32``: where parameters have 16 bits, gradients are added over
                micro-batches and ranks in this dtype, and rounded once, for the optimizer.
            compile: Compile each block with ``torch.compile``; a text names a backend of it.
            stochastic: Allow dropout, losses and buffers that depend on how the plan splits a batch.
            overlap: Sum gradients and fetch messages while blocks compute; off only for comparison.
            noise: Measure the gradient noise of every step, between replicas and pipelines: ``report.noise``.

        Raises:
            ModelError: A model that cannot be cut, built or initialised block by block.
            UnsupportedPlanError: A plan or model that cannot be run exactly.
            UsageError: The plan is for another number of blocks.

        """
        if not self._entered:
            raise UsageError("a session starts with its `with` block: with arachne.Session() as session: ...")
        recipe = Recipe(
            optimizer=optimizer, loss=loss, inputs=inputs, clip_norm=clip_norm, lr_schedule=lr_schedule,
            num_items=num_items, seed=seed, dtype=dtype, precision=Precision.of(precision),
            accumulate=accumulate, compile=compile, stochastic=stochastic,
        )  # fmt: skip
        parts = model if isinstance(model, ModelParts) else ModelParts.of(model)
        make = EngineMaker(
            parts=parts, recipe=recipe, device=self.device, hooks=self._hooks, overlap=overlap, noise=noise
        )
        if self._elastic is not None:
            return self._join(self._elastic, make)
        self.plan = self.plan if self.plan and not self._is_planless else lone_plan(parts.num_blocks)
        self._engine = make(self.plan, self._rank)
        self._engines.append(self._engine)
        self._changes = PlanChanges(self._engine, rank_order(self.plan), self._hooks)
        self._changes.listeners.append(self._follow)
        return self._engine

    def _join(self, elastic: Elastic, make: EngineMaker) -> Engine:
        """Wait for a plan that uses this device; the state is the others', where they have any."""
        if self._survivor is not None:
            raise UsageError("an elastic job moves the state of one engine; call session.engine(...) once")
        self._survivor = survivor_of(elastic, make, self._feeds, timeout_s=self._timeout_s, until=self._open)
        self._survivor.on_entered = self._entered_generation
        self._engine = self._survivor.join()
        self._engine.on_applied.append(self._feeds.after_step)
        return self._engine

    def _entered_generation(self, record: Record, rank: int) -> None:
        self.plan, self._rank, self._world_size = record.plan, rank, len(record.members)

    def replan(self, plan: Plan | Path | str) -> PlanChange:
        """Go on by another plan, in the same processes, from the state that they have now.

        Every rank calls it between the same two steps, with the same plan. The engine stays the one that the
        script has; its ``optimizer``, ``schedule`` and ``stages`` are new ones with the old state. Batches
        that come after are those that would have come.

        Args:
            plan: The plan, or its file; for the same devices, blocks and global batch.

        Raises:
            ReplanError: It failed on some rank; the training can go on by the plan that it had.
            UsageError: No engine yet, or several; other devices.
            InvalidFileError: The plan's file has faults.

        """
        return self._change().to(plan if isinstance(plan, Plan) else read_plan(plan))

    def watch_plan(self, source: Callable[[], Plan | None] | Path | str) -> None:
        """Look for another plan in every step; one that any rank finds is taken up by all behind that step.

        What fails is warned of, and the training goes on by the plan that it had.

        Args:
            source: Returns a plan, or None; or a file, which is read when it changes. Who calls this looks.

        """
        changes = self._change()
        changes.source = source if callable(source) else PlanFile(Path(source))

    def on_replan(self, tell: Callable[[PlanChange], None]) -> None:
        """Call ``tell`` on this rank after every change of plan, between two steps."""
        listeners = self._survivor.listeners if self._survivor is not None else self._change().listeners
        listeners.append(tell)

    def _follow(self, change: PlanChange) -> None:
        self.plan = change.new

    def _change(self) -> PlanChanges:
        if self._elastic is not None:
            raise UsageError(
                "in an elastic job the coordinator plans; run without --elastic to do it yourself"
            )
        if self._changes is None or len(self._engines) > 1:
            raise UsageError(
                f"a session changes the plan of its one engine, but this one has made {len(self._engines)}"
            )
        return self._changes

    def checkpoints(
        self,
        folder: Path | str,
        *, every: int = 100, keep: int = 3, background: bool = False,
    ) -> Checkpoints:  # fmt: skip
        """Write the state of the job every few steps, and go on from the newest that is there.

        Call it between ``engine`` and ``batches``, on every rank. A job that is started again, under this
        plan or any other, then has the parameters, optimizer states, learning rates, loss scale, random
        states and number of steps of the checkpoint, and ``batches`` gives the samples that come next.

        Args:
            folder: On a file system that all ranks see; of this job alone.
            every: Steps from one to the next.
            keep: The newest ones, which stay; older ones are removed.
            background: Copy the state, and write it while training goes on.

        Raises:
            InvalidFileError: The newest one was altered or cut short.
            UsageError: It is of another model or order of samples; a call in the wrong order.
            UnsupportedPlanError: The state cannot be saved or taken over under this plan.
            UnsupportedEnvironmentError: safetensors is not installed.

        """
        if self._engine is None or self._feeds.num_calls or self._checkpoints is not None:
            raise UsageError(
                "call session.checkpoints(...) once, behind session.engine(...), whose state it loads, and "
                "before session.batches(...), which it tells where to begin"
            )
        policy = Policy(
            folder=Path(folder), every=every, keep=keep, background=background, timeout_s=self._timeout_s
        )
        if self._survivor is not None and self._survivor.has_joined:
            self._checkpoints = Checkpoints.join(policy, self._engine, self._feeds.positions)
        else:
            self._checkpoints, found = Checkpoints.open(policy, self._engine, self._feeds.positions)
            self._feeds.go_on(found)
        if self._survivor is None:  # else they are told of each step already
            self._engine.on_applied.append(self._feeds.after_step)
        # before a change of plan, whose listeners may save too
        self._engine.after_step.insert(0, self._checkpoints.after_step)
        return self._checkpoints

    def batches(
        self,
        dataset: Dataset[Any],
        global_batch: int,
        *,
        seed: int = 0,
        epochs: int = 1,
        start: int = 0,
        drop_last: bool = False,
        shuffle: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
    ) -> Iterator[StepBatch]:
        """The batches of some epochs, in the one order that ``(seed, epoch)`` gives under every plan.

        What the dataset's ``__getitem__`` draws from the global generators of torch, Python and NumPy follows
        from (seed, epoch, sample), so that the ranks that read a sample's inputs and its targets agree;
        ``collate_fn`` may not draw. A generator of the dataset's own (``torch.Generator``,
        ``numpy.random.default_rng``) is not seeded by sample: the 1st, 2nd, 4th, 8th, ... sample is read
        twice, and one that differs is refused unless the engine is ``stochastic``. Every rank opens the same
        data.

        Each batch stands for ``global_batch`` samples (fewer in the last of an epoch), of which this rank
        loads those that it needs.

        Args:
            dataset: Has ``__len__`` and ``__getitem__``; every rank opens the same.
            global_batch: Samples of a step, over all ranks: the plan's.
            seed: Seed of the order.
            epochs: How often every sample is visited.
            start: Steps already done, over all epochs: the first batch is the one behind them.
            drop_last: Leave out the last batch of an epoch where it would be short.
            shuffle: Without it samples come in the order of the dataset: ``session.batches(validation, 512,
                shuffle=False)`` for ``engine.evaluate``.
            collate_fn: Makes a batch of a list of samples, as in ``torch.utils.data.DataLoader``.
            num_workers: Processes that load ahead.

        Raises:
            UsageError: A ``global_batch`` that is not the plan's, a dataset without a length, no engine yet;
                later, a sample that differs when it is read again.

        """
        if self._engine is None:
            raise UsageError(
                "which rows this rank needs depends on its stage: call session.engine(...) before"
            )
        settings = LoaderSettings(
            collate_fn=collate_fn, num_workers=num_workers, pin_memory=self.device.type == "cuda",
            exact=not self._engine.recipe.stochastic,
        )  # fmt: skip
        return batches_of(
            self._engine, self._feeds, dataset, global_batch, settings,
            seed=seed, epochs=epochs, start=start, drop_last=drop_last, shuffle=shuffle,
        )  # fmt: skip

    def print(self, *values: object) -> None:
        """Print on rank 0 only, at once; in an elastic job without an engine yet, on every rank."""
        if self._rank == 0:
            print(*values, flush=True)
