"""The small state of a job beside its tensors: steps, learning rates, loss scale, random states, places."""

import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import torch
from numpy import array, uint32
from numpy import random as numpy_random

from ..data.chance import seed_all
from ..engine import Engine
from ..errors import UsageError
from ..plan.document import Document
from .holdings import group_of
from .plain import as_json, from_json

_GROUP_LISTS = {"base_lrs": "initial_lr", "_last_lr": "lr"}
"""Lists of a schedule of torch that have an entry for each parameter group: its setting."""


class FeedPosition(Document, frozen=True, kw_only=True):
    """How far training has gone through what one call of ``session.batches`` gives."""

    num_samples: int
    global_batch: int
    seed: int
    shuffle: bool
    drop_last: bool
    steps: int
    """Done, over all epochs."""
    repeat: int = 0
    """Of the calls with this order, counted from 0."""


Positions: TypeAlias = tuple[FeedPosition | None, ...]
"""Of each call of ``session.batches`` that was trained on; None, in older files: of one that was not."""


class RandomState(Document, frozen=True, kw_only=True):
    """Of the generators that a script draws from without naming one."""

    torch_cpu: bytes
    python: tuple[int, tuple[int, ...], float | None]
    numpy_keys: bytes
    numpy_rest: tuple[int, int, float]
    cuda: bytes | None = None

    @classmethod
    def here(cls, device: torch.device) -> "RandomState":
        """Of this process."""
        numpy: Any = numpy_random.get_state(legacy=True)
        cuda = torch.cuda.get_rng_state(device).numpy().tobytes() if device.type == "cuda" else None
        return cls(
            torch_cpu=torch.get_rng_state().numpy().tobytes(),
            python=random.getstate(),
            numpy_keys=numpy[1].tobytes(),
            numpy_rest=tuple(numpy[2:]),
            cuda=cuda,
        )

    def restore(self, device: torch.device) -> None:
        """Make this process draw what that one would have drawn."""
        torch.set_rng_state(torch.frombuffer(bytearray(self.torch_cpu), dtype=torch.uint8))
        random.setstate(self.python)
        keys = array(memoryview(self.numpy_keys).cast("I"), dtype=uint32)
        numpy_random.set_state(("MT19937", keys, *self.numpy_rest))
        if self.cuda is not None and device.type == "cuda":
            torch.cuda.set_rng_state(torch.frombuffer(bytearray(self.cuda), dtype=torch.uint8), device)


def draw_as(states: Sequence[RandomState], seed: int, device: torch.device) -> None:
    """Let each generator go on from where all ``states`` have it alike, if they do; else seed it."""
    seed_all(seed)
    own = RandomState.here(device)
    alike = {
        field: getattr(states[0], field)
        for field in own.__struct_fields__
        if states and all(getattr(state, field) == getattr(states[0], field) for state in states)
    }
    msgspec.structs.replace(own, **alike).restore(device)


class JobState(Document, frozen=True, kw_only=True):
    """What one rank knows of the job beside tensors; the ranks agree on all but the random state."""

    num_steps: int
    loss_scale: tuple[float, int] | None = None
    """Factor of float16, and steps in a row with finite gradients."""
    schedule: Any = None
    """Of the learning rate; None on a rank that trains nothing, and without one."""
    options: tuple[Any, ...] = ()
    """Settings of parameter groups, each once."""
    option_of: dict[str, int] = {}  # noqa: RUF012 - msgspec copies an empty default
    """Which of them a parameter has, by its global name."""
    random: RandomState


def job_state(engine: Engine) -> JobState:
    """Of this rank, between two steps.

    Raises:
        UsageError: A schedule without ``state_dict``, or one whose state is no plain data.

    """
    options: list[Any] = []
    option_of: dict[str, int] = {}
    for name, group in _groups(engine):
        found = as_json({k: v for k, v in group.items() if k != "params"}, f"a parameter group of {name}")
        if found not in options:
            options.append(found)
        option_of[name] = options.index(found)
    scale = engine.scale
    return JobState(
        num_steps=engine.num_steps,
        loss_scale=(scale.value, scale.num_fine) if scale is not None else None,
        schedule=_schedule(engine),
        options=tuple(options),
        option_of=option_of,
        random=RandomState.here(engine.device),
    )


def restore_job(engine: Engine, job: JobState) -> None:
    """Go on from there, but for random states: learning rates first, which the schedule then knows.

    Raises:
        UsageError: Parameters of one group had unlike settings when they were saved.

    """
    engine.num_steps = engine.first_step = job.num_steps
    if engine.scale is not None and job.loss_scale is not None:
        engine.scale.value, engine.scale.num_fine = job.loss_scale
    _restore_groups(engine, job)
    if engine.schedule is not None and job.schedule is not None:
        schedule: Any = engine.schedule
        fresh = schedule.state_dict()
        schedule.load_state_dict(_with_groups(from_json(job.schedule, fresh), engine))


def restore_random(engine: Engine, states: Sequence[RandomState]) -> None:
    """Draw on as the ranks did: each its own state, or the one of all; else from a seed of step and rank."""
    rank, device = engine.places[0].rank, engine.device
    if len(states) == 1 or len(states) == len(engine.plan.devices):
        states[rank % len(states)].restore(device)
        return
    seed_all(zlib.crc32(f"{engine.recipe.seed}:{engine.num_steps}:{rank}".encode()))


def _groups(engine: Engine) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name of each parameter whose states are here, and its group; each once."""
    if engine.optimizer is None:
        return
    names = {id(p): name for name, p in engine.named_parameters()}
    for run in engine.backend.runs():
        yield names[id(run.parameter)], group_of(engine.optimizer, run.stepped)


def _restore_groups(engine: Engine, job: JobState) -> None:
    seen: dict[int, tuple[str, int]] = {}
    for name, group in _groups(engine):
        number = job.option_of.get(name)
        if number is None:  # frozen when it was saved
            continue
        first, known = seen.setdefault(id(group), (name, number))
        if known != number:
            raise UsageError(
                f"{name} and {first} are in one parameter group here, but had other settings in the "
                "checkpoint; make the optimizer with the same groups as before"
            )
        given = from_json(job.options[number], group)
        group.update({key: value for key, value in given.items() if key in group})


def _schedule(engine: Engine) -> Any:
    if engine.schedule is None:
        return None
    state_dict = getattr(engine.schedule, "state_dict", None)
    if state_dict is None:
        raise UsageError(
            f"the learning-rate schedule {type(engine.schedule).__name__} has no state_dict, so a checkpoint "
            "could not say where it is; give it state_dict and load_state_dict"
        )
    return as_json(state_dict(), "the state of lr_schedule")


def _with_groups(state: Mapping[str, Any], engine: Engine) -> dict[str, Any]:
    """A schedule's state, in which what belongs to parameter groups is that of the groups of this rank."""
    assert engine.optimizer is not None
    found = dict(state)
    for key, setting in _GROUP_LISTS.items():
        if key in found and all(setting in group for group in engine.optimizer.param_groups):
            found[key] = [group[setting] for group in engine.optimizer.param_groups]
    if isinstance(found.get("_schedulers"), list):  # SequentialLR, ChainedScheduler
        found["_schedulers"] = [_with_groups(each, engine) for each in found["_schedulers"]]
    return found
