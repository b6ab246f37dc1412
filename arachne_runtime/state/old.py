"""What one process has of the state of a job before its plan changes, wherever that lies."""

from dataclasses import astuple, dataclass
from typing import Self

import msgspec

from ..engine import Engine
from ..errors import UsageError
from ..plan.zero import zero_group_of
from .holdings import Holding, Scalars, holdings, scalars
from .job import Positions, RandomState
from .words import Progress, Settings, Told, Word


@dataclass(frozen=True, slots=True, kw_only=True)
class Old:
    """Tensors in parts, and all that is no tensor; a process that joins has none of it."""

    holdings: tuple[Holding, ...]
    scalars: Scalars
    frozen: tuple[str, ...] = ()
    """Parameters that do not train."""
    settings: Settings | None = None
    """None on a process without an optimizer."""
    progress: Progress
    random: RandomState | None = None
    """To go back to; None: this process's generators are where they should be."""
    is_kept: bool = False
    """Whether the tensors stay as they are, as those of a snapshot: no engine may take them as its own."""
    is_new: bool = False
    """Whether they were brought to a process that has not trained, so that its generators mean nothing."""

    @classmethod
    def of(cls, engine: Engine, *, feeds: Positions = (), notes: bytes = b"") -> Self:
        """Of an engine between two steps, whose groups may be gone.

        Args:
            engine: Its tensors are not copied.
            feeds: Where this process is in its data.
            notes: What else a joiner is to hear.

        Raises:
            UsageError: A schedule without ``state_dict``.
            UnsupportedPlanError: ZeRO-2 or 3; a state that is neither a number nor one of each element.

        """
        rank, scale = engine.places[0].rank, engine.scale
        group = zero_group_of(engine.plan, rank)
        return cls(
            holdings=holdings(engine),
            scalars=scalars(engine),
            frozen=tuple(name for name, p in engine.named_parameters() if not p.requires_grad),
            settings=_settings_of(engine),
            progress=Progress(
                num_steps=engine.num_steps,
                scale=astuple(scale) if scale is not None else None,
                feeds=feeds,
                notes=notes,
                shards=((rank, *group),) if group else (),
            ),
        )

    def word(self) -> Word:
        """What the others are told of it."""
        return Word(
            parts=tuple(map(Told.of, self.holdings)),
            scalars={name: dict(numbers) for name, numbers in self.scalars.items()},
            frozen=self.frozen,
            settings=_told(self.settings),
            progress=self.progress,
            is_new=self.is_new,
        )


def _settings_of(engine: Engine) -> Settings | None:
    if engine.optimizer is None:
        return None
    schedule = engine.schedule
    if schedule is not None and not hasattr(schedule, "state_dict"):
        raise UsageError(
            f"{type(schedule).__name__} has no state_dict(), so that no other plan can take it over; use a "
            "schedule of torch.optim.lr_scheduler"
        )
    return Settings(
        groups=tuple({k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups),
        schedule=None if schedule is None else schedule.state_dict(),
    )


def _told(settings: Settings | None) -> bytes:
    """For those without; nothing where they hold what no message does, such as a tensor."""
    try:
        return b"" if settings is None else msgspec.msgpack.encode(settings)
    except TypeError:
        return b""
